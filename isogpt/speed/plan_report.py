"""bench.py's plans: the layouts of a workload, predicted for devices that need not be here, or measured."""

import sys
from dataclasses import dataclass
from itertools import product

from isogpt.common import console
from isogpt.common.console import count_text, duration
from isogpt.nn.architecture import GPTConfig
from isogpt.nn.counts import flops_per_token
from isogpt.speed.devices import HARDWARE, changed_hardware, hardware_of
from isogpt.speed.launch_reports import measure
from isogpt.speed.launches import Launches
from isogpt.speed.layouts import best_of_layouts, check_fits, degrees, ranked, reason, typed
from isogpt.speed.prediction import Prediction
from isogpt.speed.workload import Workload
from isogpt.training.budget import limits_of
from isogpt.training.settings import check_training

ROWS = 18  # of the table of layouts


@dataclass(frozen=True)
class Predictor:
    """
    Ranks the layouts of a workload.

    Args:
        per_node: devices of each machine.
        network_gbit, memory_gb, tflops: see devices.changed_hardware.
    """

    workload: Workload
    per_node: int
    network_gbit: float
    memory_gb: float
    tflops: float

    def rank(self, n: int, card: str) -> list[Prediction]:
        """
        Rank the layouts on n devices of a kind: a key of devices.HARDWARE, or 'this'.

        Raises:
            ValueError: the settings do not fit each other, the data or the devices.
        """
        on_machine = min(n, self.per_node)
        check_training(self.workload.settings | {"out_dir": "out", "gradient_accumulation_steps": 1})
        wanted = self.workload.plan(n, card, machines=n // on_machine)
        this = self.workload.device, wanted.dtype, on_machine
        usual = hardware_of(*this) if card == "this" else HARDWARE[card]
        hardware = changed_hardware(usual, self.network_gbit, self.memory_gb, self.tflops)
        return ranked(wanted, hardware, on_machine)

    def command(self, prediction: Prediction) -> str:
        """The command that trains with a layout."""
        n = prediction.plan.world_size
        return self.workload.command(prediction.settings, n, self.per_node, sys.argv[1:])


def report_plan(predictor: Predictor, counts: list[int], cards: list[str]) -> dict:
    """
    Print the layouts on a number of devices of a kind, or with several numbers or kinds the fastest on each,
    and the command of the fastest.
    """
    rankings = {f"{n} x {card}": predictor.rank(n, card) for n, card in product(counts, cards)}
    fastest = print_rankings(rankings)
    command = predictor.command(fastest)
    whole_run = length_text(predictor.workload.settings, fastest)
    print(f"\nthe fastest, predicted{whole_run}:\n{command}")
    plans = [as_record(devices, step) for devices, steps in rankings.items() for step in steps]
    return {"plans": plans, "command": command}


def length_text(settings: dict, prediction: Prediction) -> str:
    """How long the whole run takes; "" if that is not set, or in epochs of data that a plan does not read."""
    limits = limits_of(settings | prediction.settings, train_tokens=0)
    if settings["max_epochs"] or not limits.max_iters:
        return ""
    steps = int(limits.max_iters) + 1  # as in nanoGPT
    took = duration(steps * prediction.total_s)
    return f", {count_text(steps, 'step')} in {took} without evaluations and checkpoints"


def print_rankings(rankings: dict[str, list[Prediction]]) -> Prediction:
    """
    Print a table of the layouts on some devices, or of the fastest on each of several, fastest first. Returns
    the fastest.

    Args:
        rankings: {devices: predictions, ranked}.

    Raises:
        ValueError: no layout fits.
    """
    most = ROWS if len(rankings) == 1 else 1
    shown = [(devices, step) for devices, steps in rankings.items() for step in best_of_layouts(steps)[:most]]
    # those that do not fit are last, smallest first
    shown.sort(key=lambda row: (-row[1].tokens_per_s, row[1].gb))
    print("predicted:")
    print_table([row_of(devices, step, rankings[devices][0]) for devices, step in shown])
    fastest = shown[0][1]
    check_fits(fastest)
    return fastest


def print_table(rows: list[dict[str, str]]) -> None:
    """Print a table from its rows: {heading: cell}."""
    columns = {heading: [row[heading] for row in rows] for heading in rows[0]}
    for line in console.aligned(columns):
        print(f"  {line}")


def row_of(devices: str, step: Prediction, best: Prediction) -> dict[str, str]:
    """A row of the table: a layout, its speed, and why it is slower than the best on these devices."""
    plan, why = step.plan, reason(step, best)
    flops = step.tokens_per_s * flops_per_token(plan.counts, GPTConfig(**plan.model_args))
    figures = {
        "ms/step": f"{step.total_s * 1e3:,.1f}",
        "tokens/s": f"{step.tokens_per_s:,.0f}",
        "TFLOP/s": f"{flops / plan.world_size / 1e12:.1f}",
    }
    if step.problem:
        figures = dict.fromkeys(figures, "")
    settings = typed(step.settings) + (f"  ({why})" if why else "")
    batch = {"devices": devices, "sequences": f"{plan.sequences:,}"}
    return batch | figures | {"GB": f"{step.gb:.1f}", "settings (why they are slower)": settings}


def as_record(devices: str, step: Prediction) -> dict:
    """A prediction for the JSON file."""
    record = {name: value for name, value in vars(step).items() if name != "plan"}
    total_s = None if step.problem else step.total_s
    return {"devices": devices} | record | {"settings": step.settings, "total_s": total_s}


def tune(predictor: Predictor, launches: Launches, card: str) -> dict:
    """Measure the best few layouts for the launched processes; print the fastest layout's command."""
    workload, n = predictor.workload, predictor.workload.processes
    predictions = predictor.rank(n, card)
    print_rankings({f"{n} x {card}": predictions})
    fitting = [prediction for prediction in predictions if not prediction.problem]
    candidates = best_of_layouts(fitting)[:4]
    # of the best layout, two other schedules, recomputations or micro-batches too
    same = [p for p in fitting if degrees(p) == degrees(candidates[0]) and p not in candidates]
    tried = candidates + same[:2]
    layouts = [prediction.settings for prediction in tried]
    varied = [name for name in layouts[0] if len({layout[name] for layout in layouts}) > 1]
    print("\nmeasured:")
    measured = measure(launches, [workload.settings | layout for layout in layouts], varied, steps=5)
    speeds = [run.get("tokens_per_s", 0.0) for run in measured]
    report = {"tried": measured}
    if max(speeds):
        report["command"] = predictor.command(tried[speeds.index(max(speeds))])
        print(f"\nthe fastest, {max(speeds):,.0f} tokens/s:\n{report['command']}")
    return report
