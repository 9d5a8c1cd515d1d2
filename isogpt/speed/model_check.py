"""
What `bench.py --check` compares: the model of model.py, small, on every layout, compiled, resumed, in
generation and exported, each with what one process computes without any of this.

Processes that bench.py starts write a line for each comparison to a file. A comparison that crashes ends its
processes, and bench.py starts new ones for the rest.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from isogpt.common.files import read_records
from isogpt.launch.network import choose_interface
from isogpt.nn import generation, huggingface
from isogpt.nn.architecture import GPTConfig
from isogpt.nn.counts import count_model
from isogpt.nn.kernels import IGNORE
from isogpt.parallel.compilation import compile_parts, trial_compilation
from isogpt.parallel.mesh import Mesh, connect_mesh
from isogpt.parallel.parallelize import init_weights, materialize
from isogpt.parallel.plan import LAYOUT, UNDIVIDED, LayoutError, Plan, plan_of
from isogpt.speed.launches import FIXED, Launches, reason_for
from isogpt.training import settings
from isogpt.training.degrees import check_degrees
from isogpt.training.layout_check import (
    NUMBER_LIMIT,
    ROWS,
    Trial,
    crash_of,
    difference_of,
    first_problem,
    small_plan,
)
from isogpt.training.optim import describe_updates, make_optimizers

CPU = torch.device("cpu")
HOLDS, REFUSED, DIFFERS = "holds", "refused", "differs"
LIMIT_S = 300.0  # for the processes of some comparisons
TIMEOUT = timedelta(seconds=20)  # of a collective: ranks that wait for different ones
# {name: settings} of the layouts of two or more processes
LAYOUTS = {
    "ddp": {},
    "zero 1": {"zero": 1},
    "zero 2": {"zero": 2},
    "zero 3": {"zero": 3},
    "tp 2": {"tp": 2},
    "cp 2": {"cp": 2},
    "pp 2, gpipe": {"pp": 2, "pp_schedule": "gpipe"},
    "pp 2, 1f1b": {"pp": 2},
    "pp 2, interleaved": {"pp": 2, "pp_schedule": "interleaved"},
    "pp 2, zero_bubble": {"pp": 2, "pp_schedule": "zero_bubble"},
    "pp 2, zbv": {"pp": 2, "pp_schedule": "zbv"},
    "ep 2": {"ep": 2},
    "islands 2": {"islands": 2},
    "exact": {"exact": True},
    "exact, zero 3": {"exact": True, "zero": 3},
    "recompute full": {"activation_checkpointing": "full"},
    "recompute selective": {"activation_checkpointing": "selective"},
}
# with four processes, also
COMBINED = {
    "tp 2, cp 2": {"tp": 2, "cp": 2},
    "tp 2, pp 2": {"tp": 2, "pp": 2},
    "cp 2, pp 2": {"cp": 2, "pp": 2},
    "zero 3, tp 2": {"zero": 3, "tp": 2},
    "zero 3, cp 2": {"zero": 3, "cp": 2},
    "zero 2, pp 2": {"zero": 2, "pp": 2},
    "zero 3, dp_replicate 2": {"zero": 3, "dp_replicate": 2},
    "ep 2, tp 2": {"ep": 2, "tp": 2},
    "ep 2, zero 3": {"ep": 2, "zero": 3},
}


# of train.py, before a layout changes them
UNDIVIDED_SETTINGS = {name: getattr(UNDIVIDED, name) for name in (*LAYOUT, "islands", "exact")}
UNDIVIDED_SETTINGS |= {"fsdp": False, "cpu_offload": False, "grad_sync": "auto", "shares": "equal"}
UNDIVIDED_SETTINGS |= {"batch_size": ROWS, "gradient_accumulation_steps": 8}


SAVED_STEP = 3  # of the run that is resumed
SHORT_RUN = {
    "device": "cpu",
    "dtype": "float32",
    "nproc": 0,
    "max_iters": 5,
    "max_tokens": 0.0,
    "max_epochs": 0.0,
    "eval_interval": SAVED_STEP,
    "save_checkpoint": True,
    "always_save_checkpoint": True,
}


@dataclass(frozen=True)
class Result:
    """What a comparison has shown: it holds, it is refused with a reason, or it differs at a place."""

    name: str
    state: str
    text: str = ""


@dataclass(frozen=True)
class Request:
    """
    What a group of processes compares.

    Args:
        config: train.py's settings.
        model_args: the fields of GPTConfig.
        names: of the comparisons, see `compare`.
    """

    config: dict
    model_args: dict
    names: list[str]
    processes: int = 1

    def plan(self, changes: dict) -> Plan:
        """The plan of a layout, in which settings of the config that divide the work are not kept."""
        config = self.config | UNDIVIDED_SETTINGS | changes
        return plan_of(
            config,
            config["islands"],
            world_size=self.processes,
            device_type="cpu",
            dtype="float32",
            model_args=self.model_args,
        )


def layouts_for(processes: int, n_expert: int) -> list[str]:
    """The names of the layouts to compare on this many processes."""
    names = LAYOUTS | (COMBINED if processes % 4 == 0 else {})
    return [name for name, changes in names.items() if n_expert or "ep" not in changes]


# ------------------------------------------------------------------------------------------------------------
# in the processes


def work(model_class: Callable[[GPTConfig], nn.Module], folder: str) -> None:
    """
    Make the comparisons of folder/request.json (all ranks), and append the results to folder/results.jsonl.
    """
    request = Request(**json.loads((Path(folder) / "request.json").read_text()))
    rank = int(os.environ.get("RANK", 0))
    if request.processes > 1:
        choose_interface()
        store = dist.FileStore(f"{folder}/store", request.processes)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=request.processes, timeout=TIMEOUT)

    def write(name: str, state: str, text: str = "") -> None:
        with open(Path(folder) / "results.jsonl", "a") as file:
            file.write(json.dumps([name, state, text]) + "\n")

    for name in request.names:
        try:
            state, text = compare(model_class, request, name, rank)
        except LayoutError as e:  # on all ranks
            state, text = REFUSED, str(e)
        except Exception as e:  # whatever an edited model raises; the other ranks may wait for this one
            write(name, REFUSED, f"it cannot be computed: {crash_of(e)}")
            break
        if rank == 0:
            write(name, state, text)
    # not destroy_process_group: other ranks may have left after a crash
    sys.stdout.flush()
    os._exit(0)


def compare(
    model_class: Callable[[GPTConfig], nn.Module], request: Request, name: str, rank: int
) -> tuple[str, str]:
    """Return the state and text of a Result (all ranks)."""
    if name in ALONE:
        plan = small_plan(request.plan({}))
        return ALONE[name](Trial(model_class, plan, Mesh(), CPU, request.config, draw=0))
    changes = (LAYOUTS | COMBINED)[name]
    plan = request.plan(changes)
    try:
        settings.check_layout(plan)
        check_degrees(plan)
    except ValueError as e:
        return REFUSED, str(e)
    mesh = connect_mesh(rank, plan, TIMEOUT.total_seconds())
    problem = first_problem(model_class, plan, mesh, CPU, request.config | changes)
    return (DIFFERS, problem) if problem else (HOLDS, "")


def compare_alone(trial: Trial) -> tuple[str, str]:
    """Whether the loss is finite, and each parameter that is trained gets a gradient."""
    model = trial.new_model()
    loss = trial.whole_step(model, trial.micro_batches())
    if not loss.isfinite():
        return DIFFERS, f"the loss is {loss.item()}"
    unused = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    return (DIFFERS, f"{unused[0]} gets no gradient") if unused else (HOLDS, "")


@torch.no_grad()
def compare_logits(trial: Trial) -> tuple[str, str]:
    """
    Compare the loss that training computes with the cross-entropy of the logits, which sampling uses, and
    with the loss in evaluation mode.
    """
    model = trial.new_model()
    x, y = trial.micro_batches()[0]
    count = float((y != IGNORE).sum())
    summed, (logits, mean), evaluated = model(x, y, count)[1], model(x, y), model.eval()(x, y, count)[1]
    last = model(x)[0]  # (B, 1, V)
    difference = difference_of("the loss of an evaluation", summed.item(), evaluated.item())
    if difference := difference or difference_of("the loss by logits", summed.item(), mean.item()):
        return DIFFERS, difference.text
    error = (last - logits[:, -1:]).norm() / logits[:, -1:].norm()
    if not error <= NUMBER_LIMIT:
        return DIFFERS, f"the logits of the last position differ by {error:.1e} without targets"
    return HOLDS, ""


def compare_compiled(trial: Trial) -> tuple[str, str]:
    """Compare the loss and the gradients of the compiled model with those of the same model, uncompiled."""
    if problem := trial_compilation(CPU):
        return REFUSED, f"it does not work on this machine: {problem}"
    whole, compiled = trial.new_model(), trial.new_model()
    compile_parts(compiled, by_block=False)
    batches = trial.micro_batches()
    losses = [trial.whole_step(model, batches).item() for model in (whole, compiled)]
    difference = difference_of("the loss", *losses) or trial.difference_of_gradients(whole, compiled)
    return (DIFFERS, difference.text) if difference else (HOLDS, "")


def compare_optimizers(trial: Trial) -> tuple[str, str]:
    """Whether a step changes each parameter that has a gradient, and no other. Says what updates them."""
    model = trial.new_model()
    trial.whole_step(model, trial.micro_batches())
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    try:
        optimizers = make_optimizers(model, trial.config)
    except ValueError as e:
        return REFUSED, str(e)
    for optimizer in optimizers:
        optimizer.step()
    for name, p in model.named_parameters():
        is_trained = p.grad is not None and bool(p.grad.any())
        if is_trained == torch.equal(p, before[name]):
            return DIFFERS, f"a step {'does not change' if is_trained else 'changes'} {name}"
    return HOLDS, describe_updates(model, optimizers, trial.mesh)


def compare_generation(trial: Trial) -> tuple[str, str]:
    """Compare the logits of cached steps with those of whole sequences, see generation.problem_of_cache."""
    model = trial.new_model().eval()
    x, _ = trial.micro_batches()[0]
    problem = generation.problem_of_cache(model, x[:1, :4], max_new_tokens=trial.length)
    return (REFUSED, problem) if problem else (HOLDS, "")


def compare_export(trial: Trial) -> tuple[str, str]:
    """
    Export the model to transformers, which compares logits, and compare the weights of what is read back.
    """
    model = trial.new_model()
    with TemporaryDirectory() as folder:
        try:
            huggingface.save(Path(folder), model, {})
            weights = type(model).from_pretrained(folder).state_dict()
        except ValueError as e:
            return REFUSED, str(e)
    wrong = [name for name, p in model.state_dict().items() if not torch.equal(p, weights[name])]
    return (DIFFERS, f"{wrong[0]} is different after the conversion back") if wrong else (HOLDS, "")


def compare_initial_values(trial: Trial) -> tuple[str, str]:
    """Compare a model that is made in memory with one that is allocated after it is made, as in a run."""
    config = GPTConfig(**trial.plan.model_args)
    expected = trial.model_class(config, trial.draw).state_dict()
    with torch.device("meta"):
        model = trial.model_class(config)
    materialize(model, CPU)
    init_weights(model, trial.draw)
    wrong = [name for name, value in model.state_dict().items() if not torch.equal(value, expected[name])]
    return (DIFFERS, f"{wrong[0]} begins with different values") if wrong else (HOLDS, "")


def compare_counts(trial: Trial) -> tuple[str, str]:
    """
    Compare the weights that a token is multiplied by, which plans and MFU count, with the matmuls and
    convolutions of a forward pass, 2 FLOPs for each weight.
    """
    if trial.plan.model_args["n_expert"]:
        return REFUSED, "torch counts no matmuls of experts"
    model = trial.new_model()
    counts = count_model(model)
    counted = 2 * counts.matrices
    x, y = trial.micro_batches()[0]
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(x, y)
    flops = {str(op): n for op, n in counter.get_flop_counts()["Global"].items()}
    measured = sum(flops.get(f"aten.{op}", 0) for op in ("mm", "addmm", "convolution")) / x.numel()
    if measured > 1.01 * counted:  # fewer, if batched matmuls compute some
        return DIFFERS, f"matmuls of {measured:,.0f} FLOPs per token, of which {counted:,} are counted"
    return HOLDS, ""


# comparisons in a single process
ALONE = {
    "one process": compare_alone,
    "initial values": compare_initial_values,
    "parameters and FLOPs": compare_counts,
    "optimizers": compare_optimizers,
    "loss by logits": compare_logits,
    "generation with a cache": compare_generation,
    "export to transformers": compare_export,
    "compile": compare_compiled,
}


# ------------------------------------------------------------------------------------------------------------
# in bench.py


def check_model(
    launches: Launches, config: dict, model_args: dict, processes: int, worker: str
) -> Iterator[Result]:
    """
    Make all comparisons, and yield the results as they arrive.

    Args:
        config: train.py's settings.
        model_args: the fields of GPTConfig of the model, which is compared in a smaller form.
        processes: how many the layouts are compared on.
        worker: Python code that calls `work` with a model class and sys.argv[1].
    """

    def compare_in_processes(names: list[str], processes: int = 1) -> list[Result]:
        return list(results(Request(config, model_args, names, processes), worker, launches))

    # two at a time: some are single processes
    with ThreadPoolExecutor(2) as pool:
        *quick, compiled = ALONE
        pending = [
            pool.submit(compare_in_processes, quick),
            pool.submit(compare_in_processes, layouts_for(processes, model_args["n_expert"]), processes),
            pool.submit(compare_resume, launches, Request(config, model_args, [])),
            pool.submit(compare_in_processes, [compiled]),
        ]
        for future in pending:
            yield from future.result()


def compare_resume(launches: Launches, request: Request) -> list[Result]:
    """
    Compare the steps of a run of train.py that is resumed in the middle with the same steps before, bit for
    bit.
    """
    args = small_plan(request.plan({})).model_args
    data = launches.folder / "random"
    data.mkdir()
    for name in ("train.bin", "val.bin"):
        tokens = np.random.default_rng(0).integers(0, args["vocab_size"], 20 * args["block_size"])
        tokens.astype(np.uint16).tofile(data / name)
    small = settings.settings_of_model(args, request.config) | {"block_size": args["block_size"]}
    run = request.config | UNDIVIDED_SETTINGS | FIXED | SHORT_RUN | small
    run |= {"dataset": data, "out_dir": launches.folder / "resumed"}
    columns = []
    for start in ({"init_from": "scratch"}, {"init_from": "resume", "resume_step": SAVED_STEP}):
        code, errors = launches.start([f"--{k}={value}" for k, value in (run | start).items()], show=False)
        if code:
            return [Result("resume", REFUSED, reason_for(code, errors))]
        records = read_records(run["out_dir"] / "metrics.jsonl")
        columns.append({r["iter"]: (r["loss"], r["grad_norm"]) for r in records if "grad_norm" in r})
    before, after = columns
    for step in range(SAVED_STEP, run["max_iters"] + 1):
        if before[step] != after[step]:
            text = f"step {step} has loss and gradient norm {after[step]} instead of {before[step]}"
            return [Result("resume", DIFFERS, text)]
    return [Result("resume", HOLDS)]


def results(request: Request, worker: str, launches: Launches) -> Iterator[Result]:
    """Start the processes of a request, and yield a Result for each of its names, in order."""
    names, home = list(request.names), launches.train_py.parent
    while names:
        attempt = launches.folder / f"attempt{next(launches.numbers)}"
        attempt.mkdir()
        rest = replace(request, names=names)
        (attempt / "request.json").write_text(json.dumps(asdict(rest)))
        processes = []
        with open(attempt / "errors.txt", "w") as errors:
            for rank in range(request.processes):
                env = os.environ | {"RANK": str(rank), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(home)}
                command = [sys.executable, "-c", worker, str(attempt)]
                processes.append(subprocess.Popen(command, env=env, stdout=errors, stderr=errors))
        end = time.monotonic() + LIMIT_S
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end - time.monotonic()))
        for process in processes:
            process.kill()  # does nothing if it has ended
        shown = {}
        path = attempt / "results.jsonl"
        for name, state, text in map(json.loads, path.read_text().splitlines() if path.exists() else []):
            shown.setdefault(name, Result(name, state, text))  # the first rank that crashed says why
        if not shown:  # no process has completed the first comparison
            lines = (attempt / "errors.txt").read_text().splitlines()
            reason = lines[-1] if lines else f"no result within {LIMIT_S:.0f} s"
            shown = {names[0]: Result(names[0], REFUSED, reason)}
        yield from shown.values()
        names = names[len(shown) :]
