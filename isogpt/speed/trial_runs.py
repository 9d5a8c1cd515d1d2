"""Small runs of train.py itself, whose records `bench.py --check` compares with those of one process."""

import re
from collections.abc import Iterator
from pathlib import Path

from isogpt.data.data_folder import write_random_tokens
from isogpt.lab.runs import read_run
from isogpt.speed.launches import FIXED, Launches, reason_for
from isogpt.training.settings import settings_of_model

HOLDS, REFUSED, DIFFERS = "holds", "refused", "differs"  # states of a row of bench.py --check
LIMIT_S, TIMEOUT_S = 600.0, 60.0  # of a comparison, and of a collective: ranks that wait for different ones
# 6 steps, which move the weights far enough to show what depends on them, with a checkpoint of the third
SETTINGS = FIXED | {"device": "cpu", "dtype": "float32", "compile": False}
SETTINGS |= {"gradient_accumulation_steps": 4, "max_iters": 5, "eval_interval": 3, "eval_iters": 4}
SETTINGS |= {"learning_rate": 1e-3, "min_lr": 1e-4, "warmup_iters": 1, "lr_decay_iters": 5}
SETTINGS |= {"cooldown_iters": 2, "save_checkpoint": True, "always_save_checkpoint": True, "layout": "manual"}
SETTINGS |= {"init_from": "scratch", "check_layout": False, "check_ranks_interval": 1, "data_order": "random"}
SETTINGS |= {"dist_timeout_s": TIMEOUT_S, "nproc": 0, "backend": "auto", "profile": False}
# what is lossy on purpose, or needs a layout or a GPU
SETTINGS |= {"grad_compression": "none", "local_steps": 1, "cuda_graphs": False}
# at most; other sizes are those of the small model
SIZES = {"n_layer": 4, "vocab_size": 256, "block_size": 64}
# {name: settings} of the runs. They have one folder: a resume continues the run before it
RUNS = {
    "train.py": {},
    "train.py, resume": {"init_from": "resume:3"},
    "train.py, ddp": {"nproc": 2},
    "train.py, zero 3": {"nproc": 2, "zero": 3},
}
# of the numbers: rounding changes them by up to 2e-7, with Muon or experts too
LIMIT = 1e-4
# the names of what is recorded about the machine
MEASURED = re.compile(r"(seconds|mfu|flops|.*_(s|ms|gb|percent))(_max)?")


def verdict(problem: str, note: str = "") -> tuple[str, str]:
    """The state and the text of a comparison with this problem, or none."""
    return (DIFFERS, problem) if problem else (HOLDS, note)


def compare_runs(launches: Launches, config: dict, model_args: dict) -> Iterator[tuple[str, str, str]]:
    """
    Run train.py in each way of RUNS, and yield the name, state and text of each: whether it records the same
    numbers as the first, after a resume bit for bit.

    Args:
        config: train.py's settings, with which nothing divides the work.
        model_args: of a small model, which becomes smaller.
    """
    args = model_args | {name: min(model_args[name], most) for name, most in SIZES.items()}
    data, length = launches.folder / "random", args["block_size"]
    data.mkdir(exist_ok=True)
    write_random_tokens(data, args["vocab_size"], 20 * length)
    out = launches.folder / "run"
    settings = config | settings_of_model(args, config) | SETTINGS
    settings |= {"block_size": length, "dataset": data, "out_dir": out}
    expected = {}
    for name, changes in RUNS.items():
        code, errors = launches.start(settings | changes, limit_s=LIMIT_S)
        if code:
            yield name, REFUSED, reason_for(code, errors)
            if not expected:
                return  # there is nothing to compare with
            continue
        numbers = recorded_numbers(out)
        expected = expected or numbers
        yield name, *verdict(first_difference(numbers, expected, 0.0 if "init_from" in changes else LIMIT))


def recorded_numbers(out: Path) -> dict[str, float]:
    """
    Return {name: number} of what train.py recorded in folder `out` of steps and evaluations, without what
    depends on the machine.
    """
    run = read_run(out)
    return {
        f"{name} of {kind} {record['iter']}": value
        for kind, records in (("step", run.steps), ("the evaluation at step", run.evaluations))
        for record in records
        for name, value in record.items()
        if isinstance(value, int | float) and not MEASURED.fullmatch(name)
    }


def first_difference(numbers: dict[str, float], expected: dict[str, float], limit: float) -> str:
    """
    The first number that differs by more than this fraction from the expected one, of those that both runs
    have recorded. Also a loss of the first step that is less than that of an evaluation of the same weights:
    a step that leaves out tokens is the same on all layouts.
    """
    for name, value in expected.items():
        if name in numbers and not abs(numbers[name] - value) <= limit * abs(value):
            return f"{name} is {numbers[name]:.9g} instead of {value:.9g}"
    loss, evaluated = map(numbers.get, ("loss of step 0", "train_loss of the evaluation at step 0"))
    # an edit may leave out either; of random tokens, they are nearly the same
    if loss and evaluated and evaluated > 1.1 * loss:
        weights = f"that of an evaluation of the same weights {evaluated:.4f}"
        return f"the loss of step 0 is {loss:.4f}, {weights}: does a step leave out tokens?"
    return ""
