"""
How fast does train.py run here? Launches train.py itself, for a few steps, and reads what it recorded.

    python bench.py                                       GPT-2 124M, 12 x 1024 tokens
    python bench.py config/train_shakespeare_char.py --batch_size=8 --dropout=0.0
    torchrun --standalone --nproc_per_node=2 bench.py     on two processes

Takes train.py's settings too. Under torchrun a step has one micro-batch for each process, unless told otherwise.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from configurator import configure, fail, settings_of

# -- the work ---------------------------------------------------------------------------------------------------------
batch_size = 12  # sequences in a micro-batch
block_size = 1024  # tokens in a sequence
bias = False  # biases in Linear and LayerNorm
real_data = True  # read the data set; False, and where openwebtext is not prepared: random tokens of GPT-2's
seed = 1337  # of weights and data
# -- how --------------------------------------------------------------------------------------------------------------
device = "auto"  # auto (cuda, else mps, else cpu), cpu, cuda, cuda:N or mps
dtype = "auto"  # auto (the best that the device runs fast), float32, tf32, bfloat16 or float16 (with a GradScaler)
compile = True  # torch.compile; left out on a CPU and, aloud, where it does not work
profile = False  # also write a torch.profiler trace, bench_trace.json in this folder
steps = 20  # how many to measure, after a quarter as many that are not
estimate = False  # first say how much memory each part takes on each rank, without allocating it
world_size = 0  # the estimate is for so many processes, and nothing is run; 0: for those that are here
# ---------------------------------------------------------------------------------------------------------------------
HERE = Path(__file__).resolve().parent
theirs = settings_of(HERE / "train.py")
config = configure(globals(), extra=theirs)
if steps < 1:
    fail(f"steps is {steps}: it must be at least 1")
rank, here = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
warmup = max(6 if profile else 1, steps // 4)


def random_tokens(folder: Path, length: int) -> str:
    """A data set of random GPT-2 tokens in `folder`; returns its path."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    for split in ("train", "val"):
        rng.integers(0, 50257, length, dtype=np.uint16).tofile(folder / f"{split}.bin")
    return str(folder)


def print_estimate() -> float:
    """Print the parts of the memory that the settings take on each rank; returns their total in GB."""
    import launch
    import loader
    import memory

    s = {k: v.default for k, v in theirs.items()} | config
    try:
        vocabulary = int(loader.read_meta(loader.find_dataset(s["dataset"])).get("vocab_size", 0))
    except ValueError:
        vocabulary = 0
    processes, stage = world_size or here, 3 if s["fsdp"] else s["zero"]
    accumulation = config.get("gradient_accumulation_steps", processes)
    where = launch.pick_device(s["device"], 0, 1)
    names = ("n_layer", "n_head", "n_embd", "block_size", "bias", "dropout")
    cost = dict(
        model_args={k: s[k] for k in names} | {"vocab_size": s["vocab_size"] or vocabulary or loader.GPT2_VOCAB},
        rows=loader.share_of(accumulation * batch_size, 0, processes, batch_size).rows,
        dtype=launch.dtype_for(s["dtype"], where),
        world_size=processes,
        zero=stage,
        dp_replicate=s["dp_replicate"],
        sync_every=s["grad_sync"] == "every" or (s["grad_sync"] == "auto" and stage >= 2),
        cpu_offload=s["cpu_offload"],
        mode=s["activation_checkpointing"],
    )
    parts = memory.memory_estimate(**cost)
    print(f"estimated GB on each of {processes} rank{'s' * (processes > 1)}, micro-batches of {cost['rows']}:")
    for name, size in parts.items():
        print(f"  {name:12} {size:8.3f}")
    return parts["total"]


if estimate and rank == 0:
    total = print_estimate()
if world_size:
    sys.exit(0 if estimate else fail("world_size is for --estimate=True: to run, start with torchrun"))

with tempfile.TemporaryDirectory(prefix="isogpt-bench-") as folder:
    args = {k: v for k, v in config.items() if k in theirs}
    args.setdefault("gradient_accumulation_steps", here)
    default = theirs["dataset"].default
    prepared = any((p / default / "train.bin").exists() for p in (Path("data"), HERE / "data"))
    if not real_data or ("dataset" not in args and not prepared):
        if real_data and rank == 0:
            print(f"data set {default} is not prepared here: random tokens instead", flush=True)
        args["dataset"] = random_tokens(Path(folder) / "random", max(2**20, 2 * block_size))
    args |= {"out_dir": str(Path(folder) / "out"), "max_iters": warmup + steps - 1, "log_interval": 1, "keep_last": 0}
    args |= {"eval_interval": 10**9, "eval_iters": 1, "init_from": args.get("init_from", "scratch"), "wandb_log": False}

    # every rank runs a train.py of its own, which inherits the launcher's variables and joins the others
    command = [sys.executable, "-u", str(HERE / "train.py"), *(f"--{k}={v}" for k, v in args.items())]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    for line in process.stdout:
        if not line.startswith(("step ", "writing", "done", "the loss curve")):
            print(line, end="", flush=True)
    if process.wait():
        sys.exit(process.returncode)  # train.py has said why

    if rank == 0:
        lines = [json.loads(line) for line in (Path(folder) / "out" / "metrics.jsonl").read_text().splitlines()]
        timed = [r for r in lines if "step_ms" in r][warmup:]
        median = {k: statistics.median(r[k] for r in timed) for k in ("step_ms", "step_ms_max", "data_ms_max")}
        tokens = args["gradient_accumulation_steps"] * args["batch_size"] * args["block_size"]
        mfu = statistics.median(r["mfu"] for r in timed) if timed[0]["mfu"] is not None else None
        print(f"\n{len(timed)} steps of {tokens:,} tokens on {here} process{'es' * (here > 1)}; medians:")
        print(f"  tokens/s      {tokens / median['step_ms'] * 1e3:,.0f}")
        print(f"  ms per step   {median['step_ms']:.2f}   (slowest rank {median['step_ms_max']:.2f})")
        print(f"  data wait     {median['data_ms_max']:.2f} ms, the slowest rank's")
        print(f"  memory        {timed[-1]['memory_gb_max']:.2f} GB at its peak, the largest rank's")
        if estimate:  # a GPU's memory is the tensors' alone; a process's on a CPU holds Python and torch as well
            print(f"  estimated     {total:.2f} GB, without what the process takes before any model (0.4 on a CPU)")
        print(f"  MFU           {f'{mfu * 100:.1f}%' if mfu is not None else 'n/a'}")
        trace = Path(folder) / "out" / "trace.json"
        if profile and trace.exists():
            shutil.copy(trace, "bench_trace.json")
            print("  trace         bench_trace.json (open in https://ui.perfetto.dev)")
