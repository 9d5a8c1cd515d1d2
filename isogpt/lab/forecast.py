"""How long the runs of a sweep will take: measured where there are records, else predicted."""

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory

from torch import nn

from isogpt.checkpoint.start import OF_UPDATES
from isogpt.common import console
from isogpt.common.console import count_text, duration
from isogpt.lab.swept_runs import MAY_CHANGE, SweptRun, is_running, measured_step_s, read_state
from isogpt.launch.device import pick_device
from isogpt.nn.architecture import GPTConfig
from isogpt.speed.devices import Hardware
from isogpt.speed.launches import Launches
from isogpt.speed.plan_report import Predictor
from isogpt.speed.prediction import predict
from isogpt.speed.workload import Workload

# settings on which the time of a step hardly depends
NOT_OF_SPEED = {*OF_UPDATES, *MAY_CHANGE, "seed", "init_from", "max_iters"} - {"nproc", "dropout"}

Kind = tuple  # the settings that determine the time of a step


def kind_of(run: SweptRun) -> Kind:
    """What runs whose steps take the same time have in common."""
    return tuple(sorted((name, value) for name, value in run.config.items() if name not in NOT_OF_SPEED))


def step_seconds(
    runs: Sequence[SweptRun], scripts: Path, model_class: Callable[[GPTConfig], nn.Module]
) -> list[float | None]:
    """
    Return the seconds of each run's steps on this machine: the mean of what runs with equal steps have
    measured, else a prediction, for which train.py takes a few steps with two of the model's blocks. A
    prediction does not include evaluations and checkpoints. None: neither is known.

    Args:
        scripts: the folder of train.py and bench.py.
        model_class: GPT, from the model.py that train.py trains.
    """
    measured = {}
    for run in runs:
        if seconds := measured_step_s(run):
            measured.setdefault(kind_of(run), []).append(seconds)
    known = {kind: mean(seconds) for kind, seconds in measured.items()}
    hardware = {}  # {(device, dtype, processes): what was measured}
    with TemporaryDirectory(prefix="isogpt-sweep-", ignore_cleanup_errors=True) as folder:
        launches = Launches(scripts / "train.py", Path(folder), 0, False, False)
        for run in runs:
            if kind_of(run) not in known:
                known[kind_of(run)] = predicted_s(run, launches, hardware, model_class)
    return [known[kind_of(run)] for run in runs]


def predicted_s(
    run: SweptRun,
    launches: Launches,
    hardware: dict[tuple, Hardware],
    model_class: Callable[[GPTConfig], nn.Module],
) -> float | None:
    """
    Predict the seconds of a run's step; None if this is not possible, for instance for weights in a folder.
    `hardware` receives what is measured on this machine.
    """
    n, settings = run.processes, run.config | {"layout": "manual"}
    device = pick_device(settings["device"], 0, n)
    workload = Workload(settings, settings, [], {}, device, n, False, False, model_class)
    predictor = Predictor(workload, launches, n)
    try:
        wanted = workload.plan(n, "this")
        machine = (settings["device"], wanted.dtype, n)
        if machine not in hardware:
            console.print_to_stderr("no run with these steps has been trained yet: measuring a few")
            hardware[machine] = predictor.this_machine(wanted, n)
        prediction = predict(wanted, hardware[machine], n)
    except ValueError:
        return None
    return None if prediction.problem else prediction.total_s


def print_forecast(
    runs: Sequence[SweptRun], at_once: int, scripts: Path, model_class: Callable[[GPTConfig], nn.Module]
) -> None:
    """
    Print how far each run is, and the time until it is complete.

    Args:
        at_once: runs that are trained at the same time.
        scripts, model_class: see `step_seconds`.
    """
    states = [read_state(run) for run in runs]
    is_done = all(state.is_complete for state in states)
    step_s = [0.0] * len(runs) if is_done else step_seconds(runs, scripts, model_class)
    left_s = []
    for run, state, seconds in zip(runs, states, step_s, strict=True):
        text, steps = state.text, 0 if state.is_complete else run.steps - state.step
        left_s.append(None if seconds is None else steps * seconds)
        if is_running(run):
            text = f"is being trained, last checkpoint at step {state.step}"
        if steps:
            text += f", {count_text(steps, 'step')} in about {time_text(left_s[-1])}"
        console.print_result(f"{run.folder}: {text}")
    total = None if None in left_s else sum(left_s) / min(at_once, len(runs))
    text = f"{count_text(len(runs), 'run')}, {at_once} at the same time: about {time_text(total)}"
    console.print_result(f"{text}, plus the time for starts, evaluations and checkpoints")


def time_text(seconds: float | None) -> str:
    """A time, as text."""
    return "n/a (no prediction for these weights)" if seconds is None else duration(seconds)
