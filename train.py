"""
Train a GPT on one process or many: the same command, the same loss curve.

    python train.py config/train_stdlib_char.py                    one process; a GPU where there is one
    python train.py --batch_size=32 --init_from=resume             settings below, overridden; goes on where it stopped
    python train.py --nproc=4                                      starts four processes of its own, by torchrun
    torchrun --standalone --nproc_per_node=8 train.py config/train_gpt2.py
    torchrun --nproc_per_node=8 --nnodes=2 --node_rank=0 --master_addr=HOST --master_port=PORT train.py ...
    srun, mpirun -n 8, accelerate launch, deepspeed: docs/operations.md
"""

import math
import os
import sys
import time
from collections.abc import Iterator
from functools import partial
from itertools import count
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

import checkpoint
import launch
import loader
import metrics
import parallel
import resilience
from configurator import configure, fail
from model import GPT, GPTConfig

# -- run --------------------------------------------------------------------------------------------------------------
out_dir = "out"  # checkpoints, metrics.jsonl and loss.png go here
seed = 1337  # initial weights, the order of the data and dropout are functions of it
device = "auto"  # auto (cuda, else mps, else cpu), cpu, cuda, cuda:N or mps
dtype = "auto"  # auto (the best that the device runs fast), float32, tf32, bfloat16 or float16 (with a GradScaler)
backend = "auto"  # auto (nccl between GPUs, else gloo), nccl or gloo
nproc = 0  # start so many processes on this machine; 0: this one, or those that a launcher started
compile = True  # torch.compile; left out on a CPU and, aloud, where it does not work
deterministic = False  # on a GPU: algorithms that give the same bits each time, slower (on a CPU they do anyway)
profile = False  # write a torch.profiler trace of 5 steps to <out_dir>/trace.json
eval_only = False  # evaluate once, then stop
stop_after_s = 0  # save and stop before so many seconds since the (launcher's) start, a scheduler's limit; 0: never
# -- saving -----------------------------------------------------------------------------------------------------------
init_from = "scratch"  # scratch, resume, gpt2[-medium|-large|-xl], a HF folder, auto (resume or scratch), auto:gpt2
always_save_checkpoint = True  # save at each evaluation; False: only where val loss is the best so far
save_interval = 0  # also save every so many steps; 0: at evaluations and at the end only
keep_last = 2  # how many saves to keep, besides the best; 0: save nothing
# -- logging ----------------------------------------------------------------------------------------------------------
eval_interval = 2000  # steps between evaluations
eval_iters = 200  # an evaluation reads eval_iters * batch_size sequences of each split, the same ones every time
log_interval = 1  # steps between logged lines
wandb_log = False  # log to Weights & Biases as well
wandb_project = "owt"  # its project
wandb_run_name = "gpt2"  # and the run's name
# -- data -------------------------------------------------------------------------------------------------------------
dataset = "openwebtext"  # a folder in data/ that its prepare.py has filled, or a path to one
data_order = "random"  # random (windows anywhere, with replacement) or shuffle (each window once an epoch)
gradient_accumulation_steps = 5 * 8  # micro-batches of a step, over all processes: each runs its share
batch_size = 12  # sequences in a micro-batch; a step has gradient_accumulation_steps * batch_size of them
block_size = 1024  # tokens in a sequence
vocab_size = 0  # number of token ids; 0: what the data set says
# -- memory -----------------------------------------------------------------------------------------------------------
zero = 0  # sharded over the ranks: 0 nothing (DDP), 1 optimizer state, 2 gradients too, 3 parameters too
fsdp = False  # short for zero=3
dp_replicate = 1  # HSDP: so many groups of ranks, each of which shards the model by itself (zero 2 or 3)
grad_sync = "auto"  # reduce gradients at the last micro-step, or every one (less memory; auto for zero 2, 3), or never
cpu_offload = False  # keep parameters and optimizer state in the CPU's memory (zero 2 or 3)
bucket_mb = 25.0  # gradients are sent in buckets of this size (zero 0 and 1)
prefetch = 1  # gather the weights of so many blocks ahead: more hides a slow network, for memory (zero 2 and 3)
activation_checkpointing = "none"  # recompute blocks in the backward: none, full, selective or every:K (one in K)
# -- resilience -------------------------------------------------------------------------------------------------------
on_nan = "stop"  # where a loss or a gradient is not finite: stop the run, or skip the step
nan_patience = 3  # so many skipped steps in a row go back to the last save and leave their batches out
max_rollbacks = 2  # so many times; then stop
timeout_s = 600.0  # how long the ranks wait for each other, at the start and in a step, before they say who is missing
check_ranks_interval = 0  # steps between comparisons of the weights of ranks that should have the same; 0: never
alert_command = ""  # a shell command that gets a line of JSON about a NaN, resume, preemption, hang, full disk, the end
# -- model ------------------------------------------------------------------------------------------------------------
n_layer = 12  # blocks
n_head = 12  # attention heads in each
n_embd = 768  # width
dropout = 0.0  # 0 for pretraining; 0.1 or more for fine-tuning
bias = False  # biases in Linear and LayerNorm, as GPT-2 has them; without is a little better and faster
# -- optimizer --------------------------------------------------------------------------------------------------------
learning_rate = 6e-4  # the highest that AdamW gets to
max_iters = 600000  # number of the last step; counted from 0, so max_iters + 1 steps are trained, as in nanoGPT
weight_decay = 1e-1  # on parameters of two or more dimensions
beta1 = 0.9  # AdamW's memory of the gradient
beta2 = 0.95  # and of its square
grad_clip = 1.0  # the gradient's norm is cut to this; 0: never
decay_lr = True  # warm up, then decay; False: learning_rate throughout
warmup_iters = 2000  # steps of linear warm-up
lr_decay_iters = 600000  # the step at which the cosine reaches min_lr; about max_iters
min_lr = 6e-5  # about learning_rate / 10
# ---------------------------------------------------------------------------------------------------------------------
try:
    launch.understand_launcher()
except ValueError as e:
    fail(str(e))
config = configure(globals())

positive = ("eval_interval", "eval_iters", "log_interval", "gradient_accumulation_steps", "batch_size", "block_size")
positive += ("n_layer", "n_head", "n_embd", "dp_replicate", "nan_patience", "prefetch")
not_negative = ("max_iters", "save_interval", "seed", "vocab_size", "warmup_iters", "lr_decay_iters", "learning_rate")
not_negative += ("min_lr", "weight_decay", "grad_clip", "keep_last", "stop_after_s", "max_rollbacks")
not_negative += ("check_ranks_interval", "nproc")
problems = [f"{k} is {config[k]}: it must be at least 1" for k in positive if config[k] < 1]
problems += [f"{k} is {config[k]}: it must not be negative" for k in not_negative if config[k] < 0]
problems += [f"seed is {seed}: it must be below 2**63"] if seed >= 2**63 else []
problems += [
    f"{k} is {config[k]}: it must be in [0, 1)" for k in ("beta1", "beta2", "dropout") if not 0 <= config[k] < 1
]
problems += [f"n_embd is {n_embd}: it must be a multiple of n_head, {n_head}"] if n_head > 0 < n_embd % n_head else []
if data_order not in ("random", "shuffle"):
    problems += [f"data_order is {data_order!r}; possible are random and shuffle"]
resumes = init_from in ("resume", "auto") or init_from.startswith("auto:")
start_from = "scratch" if init_from in ("resume", "auto") else init_from.removeprefix("auto:")
known = ("scratch", "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
if not out_dir.strip():
    problems += ["out_dir is empty: name a folder, with --out_dir="]
if start_from not in known and not (start_from and Path(start_from).is_dir()):
    problems += [f"init_from is {init_from!r}; possible: scratch, resume, auto, gpt2[-medium|-large|-xl], a folder"]
if on_nan not in ("stop", "skip"):
    problems += [f"on_nan is {on_nan!r}; possible are stop and skip"]
problems += [f"{k} is {config[k]}: it must be above 0" for k in ("timeout_s", "bucket_mb") if config[k] <= 0]
stage = 3 if fsdp else zero
try:
    parallel.recompute_every(activation_checkpointing)
except ValueError as e:
    problems += [str(e)]
if zero not in (0, 1, 2, 3):
    problems += [f"zero is {zero}; possible are 0, 1, 2 and 3"]
if fsdp and zero not in (0, 3):
    problems += [f"fsdp is short for zero=3, but zero is {zero}: set one of them"]
if grad_sync not in ("auto", "last", "every", "never"):
    problems += [f"grad_sync is {grad_sync!r}; possible are auto, last, every and never"]
if grad_sync == "never" and keep_last:
    problems += ["grad_sync is 'never', by which bench.py times communication: ranks drift apart, so set --keep_last=0"]
if (cpu_offload or dp_replicate != 1) and stage < 2:
    problems += [f"cpu_offload and dp_replicate need zero 2 or 3, but zero is {stage}: set --zero=3"]
if problems:
    fail("\n".join(problems))

# ---------------------------------------------------------------------------------------------------------------------
# who, where, in what precision (all ranks)
try:
    launch.start_workers(nproc, __file__)
    if launch.rank_variables()[1] % dp_replicate:
        raise ValueError(f"dp_replicate is {dp_replicate}: it must divide {launch.rank_variables()[1]}, the world size")
    ranks = launch.join(device, backend, alone=stage > 0, timeout_s=timeout_s)
except ValueError as e:
    fail(str(e))
say = partial(print, flush=True) if ranks.first else lambda *_: None
with launch.agreement():
    data = loader.open_dataset(dataset, block_size, vocab_size)
facts = launch.gather_objects(launch.start_facts(config) | {"the data's digest": data.digest})
with launch.agreement():
    launch.check_alike(facts)
launch.check_collective(ranks)
stop = resilience.watch_signals(stop_after_s)  # from here on there may be something to save
sequences = gradient_accumulation_steps * batch_size  # of a step, on any number of processes
job = {k: v for k, v in config.items() if k in ("batch_size", "block_size", "n_layer", "n_embd", "dataset")}
job |= {"sequences": sequences, "world_size": ranks.world_size, "zero": stage, "recompute": activation_checkpointing}
micro_batch = launch.gather_objects(resilience.recorded_micro_batch(out_dir, job, batch_size))[0]
share = loader.share_of(sequences, ranks.rank, ranks.world_size, micro_batch)

# ---------------------------------------------------------------------------------------------------------------------
# what to start from: rank 0 looks, all ranks load
with launch.agreement():
    found, reports = None, []
    if ranks.first and resumes:
        found, reports = checkpoint.newest(out_dir)
    if ranks.first and not found and (reports or init_from == "resume"):
        raise ValueError(
            "; ".join([f"nothing to resume in {out_dir}: name the run's folder with --out_dir=", *reports])
        )
    for report in reports:
        say(f"warning: {report}")
found = launch.gather_objects(found)[0]

with launch.agreement():
    source = checkpoint.open_save(found) if found else None
    run = source.run if found else {}
    saved = run.get("isogpt", {})  # what nanoGPT's checkpoints do not have
    pretrained = None
    if found:
        model_args = dict(run["model_args"])
    elif start_from == "scratch":
        model_args = dict(n_layer=n_layer, n_head=n_head, n_embd=n_embd, block_size=block_size, bias=bias)
        model_args["vocab_size"] = data.vocab_size
    else:
        pretrained = GPT.from_pretrained(start_from)
        model_args = pretrained.describe()
    if block_size > model_args["block_size"]:
        raise ValueError(
            f"block_size is {block_size}, but the weights know {model_args['block_size']} positions: "
            f"set --block_size={model_args['block_size']} or less"
        )
    if data.highest >= model_args["vocab_size"]:
        raise ValueError(
            f"{data.folder} holds token id {data.highest}, but the weights know {model_args['vocab_size']} ids: "
            f"they were trained on another data set"
        )
    model_args |= {"dropout": dropout, "block_size": block_size}  # weights of more positions are cut to these
    with torch.device("meta"):  # no memory yet: a sharded model may be larger than what one rank has
        raw_model = GPT(GPTConfig(**model_args))
    dtype_used = launch.dtype_for(dtype, ranks.device, before=saved.get("dtype"))
best_val_loss = run.get("best_val_loss", math.inf)
best_step, wandb_id = saved.get("best_step", 0), saved.get("wandb_id")
left_out = set(saved.get("left_out", []))  # steps whose batches gave no finite loss

# ---------------------------------------------------------------------------------------------------------------------
# spread the model (all ranks), then give it its weights
dtype_used = launch.agree_on_dtype(dtype_used)
launch.set_numerics(ranks.device, dtype_used, deterministic)
half = dtype_used in ("bfloat16", "float16")
parallel.recompute(raw_model, activation_checkpointing)
about_compile = parallel.compiled(raw_model, ranks, by_block=stage >= 2)[1] if compile else "compile: off"
parallel.shard(raw_model, ranks, stage, dp_replicate, launch.DTYPES[dtype_used], cpu_offload, prefetch)
parallel.materialize(raw_model, ranks.device, cpu_offload)
optimizer = parallel.make_optimizer(
    raw_model, stage, weight_decay, learning_rate, (beta1, beta2), "cpu" if cpu_offload else ranks.device.type
)
scaler = torch.amp.GradScaler(ranks.device.type, enabled=dtype_used == "float16")


def take_up(run: dict) -> None:
    """Go on at a save's step, {} for a fresh start, with its count of tokens and its loss scale."""
    global iter_num, tokens_seen
    iter_num, kept = run.get("iter_num", 0), run.get("isogpt", {})
    tokens_seen = kept.get("tokens", iter_num * sequences * block_size)
    if kept.get("scaler"):
        scaler.load_state_dict(kept["scaler"])


with launch.agreement():
    if found:
        checkpoint.fill(source, raw_model, optimizer)
    elif pretrained:
        weights = pretrained.state_dict()
        for name, p in raw_model.named_parameters():
            parallel.put(p, weights[name][: len(p)])
    else:
        raw_model.init_weights(seed, parallel.put)
    take_up(run)
source = pretrained = weights = None  # their memory is needed
model = parallel.data_parallel(raw_model, ranks, bucket_mb)
# sharded models compute in `dtype` by their own policy
autocast = torch.autocast(ranks.device.type, launch.DTYPES[dtype_used], enabled=half and stage < 2)
sync_every = grad_sync == "every" or (grad_sync == "auto" and stage >= 2)
sync_at = lambda i: sync_every or (i == share.micro_steps - 1 and grad_sync != "never")  # noqa: E731
save_group = dist.new_group(backend="gloo") if stage > 0 else None

if profile and max_iters - iter_num < 9:
    say(f"warning: --profile traces the steps after the fifth: {max_iters - iter_num + 1} steps give no trace, 10 do")
clock, log = metrics.Clock(ranks.device), metrics.Log(Path(out_dir))
owner = ""
with launch.agreement():
    if ranks.first and not eval_only:
        checkpoint.make_folder(out_dir)
    wandb_run = None
    if ranks.first and wandb_log:
        wandb_run = metrics.start_wandb(wandb_project, wandb_run_name, wandb_id, config)
        wandb_id = wandb_run.id
    if ranks.first and not eval_only:
        owner = checkpoint.take_over(out_dir)  # what an orphan saves after this does not count
        checkpoint.clean_up(out_dir)
        aside = checkpoint.adopt(out_dir, found) if found else checkpoint.set_aside(out_dir)
        (Path(out_dir) / resilience.MARK).unlink(missing_ok=True)
        log = metrics.open_log(out_dir, iter_num)
        say(f"{out_dir} held an earlier run, which is in {aside} now" if aside else f"writing to {out_dir}")
    log.wandb = wandb_run
owner = launch.gather_objects(owner)[0]
peak, peak_source = metrics.peak_flops(ranks.device, dtype_used)
peaks = launch.gather_objects(peak)
peak = sum(peaks) if all(peaks) else None
tokens_a_step = sequences * block_size
flops_a_step = raw_model.flops_per_token() * tokens_a_step

say(f"data:    {data.folder}, {len(data.train):,} training tokens, vocabulary {model_args['vocab_size']}")
empty = share.micro_steps * share.rows * ranks.world_size - sequences
source = f"{found.path}, step {iter_num}" if found else start_from
say(f"model:   {raw_model.get_num_params() / 1e6:.2f}M parameters, from {source}")
about_zero = f", zero {stage}" if stage else ""
say(f"ranks:   {ranks.topology()} on {ranks.device.type}, {ranks.network}, {dtype_used}{about_zero}; {about_compile}")
say(f"step:    {sequences} sequences x {block_size} = {tokens_a_step:,} tokens, on each rank {share.micro_steps} "
    f"micro-steps x {share.rows} rows" + f" ({empty} rows stay empty)" * bool(empty))  # fmt: skip
say(f"peak:    {peak / 1e12:.3g} TFLOP/s ({peak_source})" if peak else "peak:    unknown, so mfu is n/a")
if micro_batch < batch_size:
    say(f"memory:  micro-batches of {micro_batch} instead of {batch_size}, since an attempt before ran out of memory")


def tell(event: str, **facts: object) -> None:
    """Note in metrics.jsonl what happened, and tell the user's alert_command (rank 0; nothing on the others)."""
    log.event(event, iter_num, **facts)
    if ranks.first and event != "save":
        last = event in ("end", "preempted", "failed")
        record = metrics.as_json({"event": event, "iter": iter_num, "out_dir": out_dir, **facts})
        resilience.alert(alert_command, record, 10 * last)


tell("resume" if found else "start", config=config, world_size=ranks.world_size, dtype=dtype_used,
     micro_batch=micro_batch, parameters=raw_model.get_num_params(), peak_flops=peak)  # fmt: skip
last_words = lambda text: tell("failed", reason=text)  # noqa: E731


def starts_of(step: int) -> np.ndarray:
    """The windows (sequences,) that step reads."""
    if data_order == "shuffle":
        return loader.shuffled_windows(len(data.train), block_size, seed, step, sequences)
    return loader.random_windows(len(data.train), block_size, seed, loader.TRAIN, step, sequences)


def get_lr(step: int) -> float:
    """Linear warm-up, then a cosine down to min_lr, which stays."""
    if not decay_lr:
        return learning_rate
    if step < warmup_iters:
        return learning_rate * (step + 1) / (warmup_iters + 1)
    if step >= lr_decay_iters:
        return min_lr
    progress = (step - warmup_iters) / (lr_decay_iters - warmup_iters)  # 0 to 1
    return min_lr + 0.5 * (1 + math.cos(math.pi * progress)) * (learning_rate - min_lr)


def asked_to_stop() -> int:
    """
    What any rank was asked to stop by, 0 if nothing (all ranks): a signal's number, or TIME_IS_UP where the time that
    is left is just what a save takes, after the one that may be under way.
    """
    return resilience.any_code(launch.gather_rows([stop.code(1 + 2 * save_s)], ranks.device))


@torch.no_grad()
def evaluate(tokens: np.ndarray, stream: int) -> float | None:
    """Mean loss over the split's fixed sequences, each rank its share of them (all ranks); None if asked to stop."""
    wanted = eval_iters * batch_size
    part = loader.share_of(wanted, ranks.rank, ranks.world_size, micro_batch)
    starts = loader.random_windows(len(tokens), block_size, seed, stream, 0, wanted)
    raw_model.eval()
    total = 0.0
    for x, y in loader.micro_batches(
        tokens, lambda _: starts, [0], part, block_size, model_args["vocab_size"], ranks.device
    ):
        with clock("evaluation"), autocast:
            total += raw_model(x, y, 1.0)[1].item()
        if is_stopping := bool(asked_to_stop()):
            break
    raw_model.train()
    parallel.reshard(raw_model)
    total = launch.gather_rows([total], ranks.device).sum().item()
    return None if is_stopping else total / (wanted * block_size)


def finish_save() -> bool:
    """Wait until the save that was begun is whole (all ranks); says whether it is."""
    global saving
    watchdog.armed = False  # a slow disk is no hang
    problem = checkpoint.finish_save(saving) if saving else ""
    saving = None
    if problem:
        say(f"warning: {out_dir}: a step could not be saved ({problem}); the saves before it are whole")
        tell("save_failed", reason=problem)
    return not problem


def save(val_loss: float | None = None) -> None:
    """Begin to save the run as it stands before step iter_num (all ranks); the writing goes on in the background."""
    global saving, save_s
    finish_save()
    with launch.agreement(last_words):
        checkpoint.check_finite(raw_model, iter_num)
        if ranks.first:
            checkpoint.check_owner(Path(out_dir), owner)
    extra = dict(dtype=dtype_used, scaler=scaler.state_dict(), best_step=best_step, tokens=tokens_seen)
    extra["left_out"] = sorted(left_out)
    run = {
        "model_args": model_args,
        "iter_num": iter_num,
        "best_val_loss": best_val_loss,
        "config": config,
        "isogpt": {**extra, "wandb_id": wandb_id, "world_size": ranks.world_size},
    }
    facts = {"best_step": best_step, "val_loss": val_loss, "layout": {"world_size": ranks.world_size, "zero": stage}}
    began, step = time.perf_counter(), iter_num

    def whole(folder: Path) -> None:
        global save_s
        save_s = time.perf_counter() - began
        log.event("save", step, folder=folder.name, seconds=save_s, stall=stall)
        say(f"saved {folder}")

    stall = 0.0
    with clock("save"):
        saving = checkpoint.start_save(out_dir, run, raw_model, optimizer, facts, keep_last, owner, save_group, whole)
    stall = time.perf_counter() - began


def batches_from(step: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """This rank's micro-batches of the steps from here on, read ahead."""
    steps = (s for s in count(step) if s not in left_out)
    return loader.micro_batches(data.train, starts_of, steps, share, block_size, model_args["vocab_size"], ranks.device)


def describe_not_finite(rows: torch.Tensor) -> tuple[str, dict]:
    """Which ranks had a loss that is not finite, what they read, the largest gradients: in words, and for the log."""
    guilty = [r for r in range(ranks.world_size) if not rows[r, 0].isfinite()] or list(range(ranks.world_size))
    read = {}  # by rank, where its rows start
    for r in guilty:
        part = loader.share_of(sequences, r, ranks.world_size, micro_batch)
        read[r] = [int(s) for m in range(part.micro_steps) for s in part.pick(starts_of(iter_num), m)][:64]
    norms = {n: parallel.whole(p.grad.norm()).item() for n, p in raw_model.named_parameters() if p.grad is not None}
    largest = sorted(norms, key=lambda n: (math.isfinite(norms[n]), -norms[n]))[:5]
    losses, grad_norm = rows[:, 0].tolist(), rows[0, 1].item()
    text = (
        f"step {iter_num}: not finite on rank {', '.join(map(str, guilty))}: loss by rank {losses}, gradient's norm "
        f"{grad_norm:.3g}; largest gradients {', '.join(f'{n} {norms[n]:.3g}' for n in largest)}; "
        f"rows start at token {'; '.join(f'{v[:8]} (rank {r})' for r, v in list(read.items())[:4])}"
    )
    gradients = {n: norms[n] for n in largest}
    return text, dict(loss=losses, grad_norm=grad_norm, ranks=guilty, windows=read, largest_gradients=gradients)


def not_finite(rows: torch.Tensor) -> None:
    """
    Step iter_num gave a loss or a gradient that is not finite (all ranks): say where, and drop the step, which has
    changed nothing yet; go back to the last save after several in a row; or end the run.
    """
    global batches, dropped, iter_num, rollbacks
    text, found = describe_not_finite(rows)
    tell("not_finite", **found)
    optimizer.zero_grad(set_to_none=True)
    if scaler.is_enabled():
        scaler.update()
    dropped += [iter_num]
    iter_num += 1
    if on_nan == "skip" and len(dropped) < nan_patience:
        say(f"warning: {text}: this step is left out")
        return
    finish_save()
    with launch.agreement(last_words):
        back, _ = checkpoint.newest(out_dir) if ranks.first and on_nan == "skip" else (None, None)
    back = launch.gather_objects(back)[0]
    with launch.agreement(last_words):
        if on_nan == "stop" or not back or rollbacks >= max_rollbacks:
            again = "with --init_from=resume" if checkpoint.step_folders(Path(out_dir)) else "again"
            raise ValueError(
                f"{text}; the step was not taken and nothing that was saved is lost. Start {again} at a lower "
                f"--learning_rate" + ", or with --on_nan=skip" * (on_nan == "stop")
            )
        parallel.reshard(raw_model)
        source = checkpoint.open_save(back)
        checkpoint.fill(source, raw_model, optimizer)
    left_out.update(dropped)
    take_up(source.run)
    tell("rollback", to=iter_num, left_out=sorted(left_out), rollback=rollbacks + 1)
    say(f"warning: {len(dropped)} steps in a row were not finite: back to step {iter_num}, leaving {dropped} out")
    if ranks.first and log.file:
        log.file = metrics.open_log(out_dir, iter_num).file
    dropped, rollbacks, batches = [], rollbacks + 1, batches_from(iter_num)


def look_after(loss: float, rows: torch.Tensor) -> None:
    """Tell of a loss that jumps, and of ranks that stay slower or larger than the others (rank 0)."""
    if spikes.seen(loss):
        tell("spike", loss=loss)
    columns = {"forward ms": rows[:, 5], "data wait ms": rows[:, 3], "memory GB": rows[:, 4]}
    for slow in slow_ranks.seen({what: values.tolist() for what, values in columns.items()}):
        say(f"warning: a slow rank: {slow}")
        tell("slow_rank", what=slow)


def explain_memory() -> str:
    """What the memory of a step is made of."""
    import memory  # half a second that only this needs

    return memory.memory_report(cost)


# ---------------------------------------------------------------------------------------------------------------------
# the loop
first_step, saving, parameters = iter_num, None, list(raw_model.parameters())
save_s = 0.0  # how long the last save took
dropped, rollbacks, asked = [], 0, 0
spikes, slow_ranks = resilience.Spikes(), resilience.SlowRanks()
cost = dict(model_args=model_args, rows=share.rows, dtype=dtype_used, world_size=ranks.world_size, zero=stage,
            dp_replicate=dp_replicate, sync_every=sync_every, cpu_offload=cpu_offload,
            mode=activation_checkpointing, prefetch=prefetch, on_cpu=ranks.device.type == "cpu")  # fmt: skip
early = lambda: iter_num < first_step + 3  # noqa: E731
place = lambda: (clock.count, f"step {iter_num}, {clock.doing}")  # noqa: E731
watchdog = resilience.Watchdog(ranks.store, ranks.rank, ranks.names(), timeout_s, place)
last_wish = lambda: saving and ranks.first and stage == 0 and checkpoint.finish_save(saving)  # noqa: E731
resilience.explain_crashes(
    out_dir, job, share.rows, ranks.rank, loader.DataError, early, explain_memory, watchdog, last_wish
)
watchdog.hang, watchdog.finish = last_words, last_wish
targets_a_rank = tokens_a_step / ranks.world_size  # what losses are divided by: the ranks' mean is the batch's
parallel.settle_buckets(model, *loader.nothing(share.rows, block_size, ranks.device), targets_a_rank, autocast)
batches = batches_from(iter_num)
profiler = metrics.start_profiler(out_dir) if profile and ranks.first else None
if iter_num > max_iters and not eval_only:
    say(f"{out_dir} is at step {iter_num} already, past max_iters: to go on, set --max_iters={2 * iter_num} or so")
began = mark = time.perf_counter()

while iter_num <= max_iters or eval_only:
    launch.seed_step(seed, iter_num, ranks.rank)
    lr = get_lr(iter_num)
    for group in optimizer.param_groups:
        group["lr"] = lr

    # evaluate and save (all ranks): the state before this step
    paused = time.perf_counter()
    val_loss = None
    if eval_only or iter_num % eval_interval == 0:
        train_loss, val_loss = evaluate(data.train, loader.EVAL_TRAIN), evaluate(data.val, loader.EVAL_VAL)
        if val_loss is None:
            asked = asked_to_stop()
            break
        say(f"step {iter_num}: train loss {train_loss:.4f}, val loss {val_loss:.4f}")
        log.write({"iter": iter_num, "train_loss": train_loss, "val_loss": val_loss})
        metrics.send(log, iter_num, {"train/loss": train_loss, "val/loss": val_loss, "lr": lr})
    if eval_only:
        break
    is_best = val_loss is not None and val_loss < best_val_loss
    if is_best:
        best_val_loss, best_step = val_loss, iter_num
    is_due = is_best or (val_loss is not None and always_save_checkpoint)
    is_due |= save_interval > 0 and iter_num % save_interval == 0
    if keep_last and is_due and iter_num > first_step:
        save(val_loss)
    if val_loss is not None and ranks.first and iter_num > first_step:
        metrics.draw(log.out_dir)
    if check_ranks_interval and iter_num % check_ranks_interval == 0:
        wrong = parallel.differing(raw_model, ranks, ranks.world_size // dp_replicate if stage >= 2 else 1)
        with launch.agreement(last_words):
            if wrong:
                raise ValueError(f"step {iter_num}: the ranks' weights have parted: {wrong}")
    mark += time.perf_counter() - paused
    if iter_num in left_out:
        iter_num += 1
        continue

    # this rank's share of the batch, forward and backward; the last micro-step's backward averages over the ranks
    loss_sum, waited = torch.zeros((), device=ranks.device), 0.0
    for micro_step in range(share.micro_steps):
        waits = time.perf_counter()
        x, y = next(batches)  # (rows, block_size) each
        waited += time.perf_counter() - waits
        with parallel.sync_if(model, sync_at(micro_step)):
            with clock("forward"), autocast:
                _, loss = model(x, y, targets_a_rank)
            with clock("backward"):
                scaler.scale(loss).backward()
        loss_sum += loss.detach()

    with clock("clip"):
        scaler.unscale_(optimizer)
        grad_norm = parallel.whole(get_total_norm([p.grad for p in parameters if p.grad is not None]))

    # all ranks decide together: the one small collective of the step, and where the CPU waits for the device
    step_ms, mark = (time.perf_counter() - mark) * 1e3, time.perf_counter()
    row = [loss_sum, grad_norm, step_ms, waited * 1e3, metrics.memory_gb(ranks.device), clock.last("forward"),
           stop.code(1 + 2 * step_ms / 1e3 + 2 * save_s)]  # fmt: skip
    with clock("agree"):
        rows = launch.gather_rows(row, ranks.device)  # (world_size, 7)
    # with float16 the scaler skips an overflow itself, and halves its scale: at 1 it is none of the scale's making
    overflows = scaler.is_enabled() and scaler.get_scale() > 1
    finite = rows[:, 0].isfinite() & (rows[:, 1].isfinite() | overflows)
    if not finite.all():
        not_finite(rows)
        continue
    dropped = []
    with clock("clip"):
        if grad_clip > 0:
            clip_grads_with_norm_(parameters, grad_clip, grad_norm)
    with clock("optimizer"):
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
    clock.step(data=waited * 1e3)
    tokens_seen += tokens_a_step

    if iter_num % log_interval == 0 and ranks.first:
        record = metrics.step_record(iter_num, rows, lr, tokens_seen, tokens_a_step, flops_a_step, peak)
        record["gpu_percent"] = metrics.utilization(ranks.device)
        left = (time.perf_counter() - began) / max(1, iter_num - first_step + 1) * (max_iters - iter_num)
        say(metrics.step_line(record, left))
        log.write(record)
        percent = None if record["mfu"] is None else record["mfu"] * 100  # as nanoGPT sends it
        metrics.send(log, iter_num, record | {"mfu": percent})
        look_after(record["loss"], rows)
    if profiler:
        profiler.step()
    if iter_num == first_step and log.stood_since:
        log.event("recovered", iter_num, seconds=time.time() - log.stood_since)
    watchdog.armed = True
    iter_num += 1
    asked = resilience.any_code(rows[:, 6])
    if asked and iter_num <= max_iters:
        break

is_saved, asked = True, asked if iter_num <= max_iters else 0  # asked to stop before the end (all ranks)
spans = metrics.summary(launch.gather_objects(clock.medians()))
if iter_num > first_step:
    if keep_last:
        save()
    is_saved = finish_save()
    picture = metrics.draw(log.out_dir) if ranks.first else None
    took = metrics.duration(time.perf_counter() - began)
    say(f"done: {iter_num - first_step} steps in {took}, best val loss {best_val_loss:.4f} at step {best_step}")
    say(f"the loss curve: {picture}" if picture else "no picture of the loss curve: pip install matplotlib")
with launch.agreement(last_words):
    if not is_saved:
        raise ValueError(f"the end of the run could not be saved in {out_dir}")
    if asked and ranks.first and not eval_only:
        resilience.leave_mark(out_dir, iter_num, asked)
        say(f"stopped as asked before step {iter_num}" + ": go on with --init_from=resume or auto" * (keep_last > 0))
tell("preempted" if asked else "end", spans_ms=spans, **(dict(signal=asked) if asked else {}))
log.close()
watchdog.stop()
model = raw_model = optimizer = batches = parameters = None
launch.leave()
if asked > 0 and "RANK" not in os.environ:  # a launcher would take this for a failure, and start the run again
    sys.exit(128 + asked)
