"""bench.py's plans: the layouts of a workload, predicted for devices that need not be here, or measured."""

import sys
from dataclasses import dataclass, replace
from itertools import product

from isogpt.common import console
from isogpt.common.console import count_text, duration
from isogpt.nn.architecture import GPTConfig
from isogpt.nn.counts import flops_per_token
from isogpt.parallel.plan import LAYOUT, UNDIVIDED, Plan, normalized
from isogpt.speed.devices import HARDWARE, Hardware, changed_hardware, hardware_of
from isogpt.speed.launches import Launches
from isogpt.speed.layouts import best_of_layouts, check_fits, degrees, ranked, reason, typed
from isogpt.speed.prediction import Prediction, calibrated
from isogpt.speed.sweep import Table
from isogpt.speed.workload import Workload
from isogpt.training.budget import limits_of
from isogpt.training.settings import check_training

ROWS = 18  # of the table of layouts
SETTINGS = "settings (why they are slower)"
# two of the model's blocks, which calibrate the predictions for a CPU, undivided and without communication
TWO_BLOCKS = {name: getattr(UNDIVIDED, name) for name in LAYOUT} | {"n_layer": 2, "grad_sync": "never"}


@dataclass(frozen=True)
class Predictor:
    """
    Ranks the layouts of a workload.

    Args:
        launches: of train.py.
        per_node: devices of each machine.
        network_gbit, memory_gb, tflops: see devices.changed_hardware.
    """

    workload: Workload
    launches: Launches
    per_node: int
    network_gbit: float = 0.0
    memory_gb: float = 0.0
    tflops: float = 0.0

    def rank(self, n: int, card: str) -> list[Prediction]:
        """
        Rank the layouts on n devices of a kind: a key of devices.HARDWARE, or 'this'.

        Raises:
            ValueError: the settings do not fit each other, the data or the devices.
        """
        on_machine = min(n, self.per_node)
        one_step = {"out_dir": "out", "gradient_accumulation_steps": 1}
        check_training(self.workload.without_weights() | one_step)
        wanted = self.workload.plan(n, card, machines=n // on_machine)
        usual = self.this_machine(wanted, on_machine) if card == "this" else HARDWARE[card]
        hardware = changed_hardware(usual, self.network_gbit, self.memory_gb, self.tflops)
        return ranked(wanted, hardware, on_machine)

    def this_machine(self, wanted: Plan, n: int) -> Hardware:
        """The speeds of this machine with n processes. On a CPU, a few steps of two blocks are measured."""
        machine = hardware_of(self.workload.device, wanted.dtype, n)
        if wanted.device_type == "cuda":
            return machine
        settings = normalized(self.workload.without_weights()) | TWO_BLOCKS
        rows = max(1, 1024 // settings["block_size"])
        settings |= {"nproc": n, "batch_size": rows, "gradient_accumulation_steps": n}
        run = self.launches.run(settings, 5)
        if "problem" in run:
            return machine
        two_blocks = replace(self.workload, settings=settings).plan(n, "this")
        return calibrated(machine, two_blocks, run["step_ms"]["mean"] / 1e3)

    def command(self, layout: dict, n: int) -> str:
        """The command that trains with a layout on n devices."""
        return self.workload.command(layout, n, self.per_node, sys.argv[1:])


def report_plan(predictor: Predictor, counts: list[int], cards: list[str]) -> dict:
    """
    Print the layouts on a number of devices of a kind, and the command of the fastest. With several numbers
    or kinds, print the fastest layout on each instead.
    """
    if len(counts) * len(cards) > 1:
        return compare_devices(predictor, counts, cards)
    predictions = rank_and_print(predictor, counts[0], cards[0])
    command = predictor.command(predictions[0].settings, counts[0])
    whole_run = length_text(predictor.workload.settings, predictions[0])
    print(f"\nthe fastest, predicted{whole_run}:\n{command}")
    return {"plans": [as_record(prediction) for prediction in predictions], "command": command}


def length_text(settings: dict, prediction: Prediction) -> str:
    """How long the whole run takes; "" if that is not set, or in epochs of data that a plan does not read."""
    limits = limits_of(settings | prediction.settings, train_tokens=0)
    if settings["max_epochs"] or not limits.max_iters:
        return ""
    steps = int(limits.max_iters) + 1  # as in nanoGPT
    took = duration(steps * prediction.total_s)
    return f", {count_text(steps, 'step')} in {took} without evaluations and checkpoints"


def rank_and_print(predictor: Predictor, n: int, card: str) -> list[Prediction]:
    """
    Rank the layouts on n devices of a kind; print the fastest as a table, and some that do not fit.

    Raises:
        ValueError: no layout fits, or see Predictor.rank.
    """
    predictions = predictor.rank(n, card)
    batch = count_text(predictions[0].plan.sequences, "sequence")
    devices = f"{n} x {card}, {min(n, predictor.per_node)} on each machine"
    print(f"the global batch of {batch} on {devices}, predicted:")
    print_table(rows_of(predictions))
    check_fits(predictions)
    return predictions


def rows_of(predictions: list[Prediction]) -> list[dict[str, str]]:
    """The rows of a table of layouts, with the reasons why they are slower than the first."""
    rows = []
    for prediction in best_of_layouts(predictions)[:ROWS]:
        why = reason(prediction, predictions[0])
        rows.append(row_of(prediction, typed(prediction.settings) + (f"  ({why})" if why else "")))
    return rows


def row_of(prediction: Prediction, settings: str) -> dict[str, str]:
    """A row of a table: time, speed, FLOP/s of each device and memory of a step, and its settings."""
    plan, speed = prediction.plan, prediction.tokens_per_s
    flops = speed * flops_per_token(plan.counts, GPTConfig(**plan.model_args)) / plan.world_size
    row = {"ms/step": f"{prediction.total_s * 1e3:,.1f}", "tokens/s": f"{speed:,.0f}"}
    row["TFLOP/s"] = f"{flops / 1e12:.1f}"
    if prediction.problem:
        row = dict.fromkeys(row, "")
    return row | {"GB": f"{prediction.gb:.1f}", SETTINGS: settings}


def print_table(rows: list[dict[str, str]]) -> None:
    """Print a table from its rows: {heading: cell}."""
    columns = {heading: [row[heading] for row in rows] for heading in rows[0]}
    for line in console.aligned(columns):
        print(f"  {line}")


def as_record(prediction: Prediction) -> dict:
    """A prediction for the JSON file."""
    record = {name: value for name, value in vars(prediction).items() if name != "plan"}
    total_s = None if prediction.problem else prediction.total_s
    return record | {"settings": prediction.settings, "total_s": total_s}


def compare_devices(predictor: Predictor, counts: list[int], cards: list[str]) -> dict:
    """Print the fastest layout on each number of devices of each kind, the fastest first."""
    compared = [(card, predictor.rank(n, card)[0]) for n, card in product(counts, cards)]
    # those on which no layout fits are last, smallest first
    compared.sort(key=lambda pair: (-pair[1].tokens_per_s, pair[1].gb))
    rows, records = [], []
    for card, step in compared:
        n, settings = step.plan.world_size, "does not fit" if step.problem else typed(step.settings)
        devices = {"devices": f"{n} x {card}", "sequences": f"{step.plan.sequences:,}"}
        rows.append(devices | row_of(step, settings))
        records.append({"devices": n, "hardware": card} | as_record(step))
    print("the fastest layout on each, with the sequences of the global batch, predicted:")
    print_table(rows)
    fastest = "--devices={devices} --hardware={hardware}".format(**records[0])
    print(f"\nfor all layouts of a line and its command, type for example {fastest}")
    return {"compared": records}


def tune(predictor: Predictor, card: str) -> dict:
    """Measure the best few layouts for the launched processes; print the fastest layout's command."""
    workload = predictor.workload
    predictions = rank_and_print(predictor, workload.processes, card)
    fitting = [prediction for prediction in predictions if not prediction.problem]
    candidates = best_of_layouts(fitting)[:4]
    # of the best layout, two other schedules, recomputations or micro-batches too
    same = [p for p in fitting if degrees(p) == degrees(candidates[0]) and p not in candidates]
    layouts = [prediction.settings for prediction in candidates + same[:2]]
    varied = [name for name in layouts[0] if len({layout[name] for layout in layouts}) > 1]
    print("\nmeasured:")
    measured = Table(predictor.launches, tuple(varied), steps=5)
    for layout in layouts:
        measured.add(workload.settings | layout)
    speeds = [run.get("tokens_per_s", 0.0) for run in measured.runs]
    report = {"tried": measured.runs}
    if max(speeds):
        fastest = layouts[speeds.index(max(speeds))]
        report["command"] = predictor.command(fastest, workload.processes)
        print(f"\nthe fastest, {max(speeds):,.0f} tokens/s:\n{report['command']}")
    return report
