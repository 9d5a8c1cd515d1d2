"""bench.py's plans: the layouts of a workload, predicted for devices that need not be here, or measured."""

import json
import subprocess
import sys
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from isogpt.common.console import count_text, duration
from isogpt.parallel.plan import Plan
from isogpt.speed.devices import HARDWARE, Hardware, changed_hardware, hardware_here, measured_link
from isogpt.speed.launches import Launches
from isogpt.speed.layouts import best_of_layouts, check_fits, degrees, ranked, reason, smallest_world, typed
from isogpt.speed.prediction import Prediction, calibrated, two_blocks
from isogpt.speed.sweep import Table
from isogpt.speed.workload import Workload
from isogpt.training.budget import steps_of
from isogpt.training.settings import check_training

ROWS, ROWS_THAT_DO_NOT_FIT = 15, 3  # of the table of layouts
HEADER = f"{'ms/step':>9} {'tokens/s':>12} {'TFLOP/s':>8} {'GB':>6}  settings (why they are slower)"


@dataclass(frozen=True)
class Ranking:
    """All layouts of a workload on some devices of a kind, fastest first."""

    wanted: Plan  # that the settings describe
    card: str
    hardware: Hardware
    predictions: list[Prediction]


@dataclass(frozen=True)
class Predictor:
    """
    Ranks the layouts of a workload.

    Args:
        launches: of train.py, which measure this machine.
        flops: the model's FLOPs per token.
        per_node: devices of each machine.
        network_gbit, memory_gb, tflops: see devices.changed_hardware.
    """

    workload: Workload
    launches: Launches
    bench_py: Path
    flops: float
    per_node: int
    network_gbit: float
    memory_gb: float
    tflops: float

    def rank(self, n: int, card: str) -> Ranking:
        """
        Rank the layouts on n devices of a kind: a key of devices.HARDWARE, or 'this', which is measured.

        Raises:
            ValueError: the settings do not fit each other, the data or the devices.
        """
        on_machine = min(n, self.per_node)
        one_step = {"out_dir": "out", "gradient_accumulation_steps": 1}
        check_training(self.workload.without_weights() | one_step)
        wanted = self.workload.plan(n, card, machines=n // on_machine)
        usual = self.measured_machine(wanted, on_machine) if card == "this" else HARDWARE[card]
        hardware = changed_hardware(usual, self.network_gbit, self.memory_gb, self.tflops)
        return Ranking(wanted, card, hardware, ranked(wanted, hardware, on_machine))

    def measured_machine(self, wanted: Plan, n: int) -> Hardware:
        """Measure this machine with n processes: large operations, collectives, two of the model's blocks."""
        device, link = self.workload.device, None
        if n > 1:
            path = self.launches.folder / "comm.json"
            settings = [f"--nproc={n}", f"--device={self.workload.settings['device']}", f"--json_path={path}"]
            command = [sys.executable, str(self.bench_py), "--comm", *settings]
            subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
            link = measured_link(json.loads(path.read_text())["comm"])
        machine = hardware_here(device, wanted.dtype, n, link)
        if device.type == "cuda":
            return machine
        two = two_blocks(wanted, n)
        settings = self.workload.without_weights() | {"n_layer": 2, "nproc": n}
        settings |= {name: value for name, value in vars(two).items() if name in settings}
        run = self.launches.run(settings, 5)
        return machine if "problem" in run else calibrated(machine, two, run["step_ms"]["mean"] / 1e3)

    def command(self, layout: dict, n: int) -> str:
        """The command that trains with a layout on n devices."""
        return self.workload.command(layout, n, self.per_node, sys.argv[1:])


def report_plan(predictor: Predictor, counts: list[int], cards: list[str]) -> dict:
    """
    Print the layouts on a number of devices of a kind, and the command of the fastest. With several numbers
    or kinds, print the fastest layout on each instead.
    """
    rankings = [predictor.rank(n, card) for n, card in product(counts, cards)]
    if len(rankings) > 1:
        return compare_devices(predictor, rankings)
    print_layouts(predictor, rankings[0])
    fastest = rankings[0].predictions[0]
    command = predictor.command(fastest.settings, counts[0])
    whole_run = ""
    settings, wanted = predictor.workload.settings, rankings[0].wanted
    steps = int(settings["max_iters"]) + 1 if settings["max_iters"] else 0  # as in nanoGPT
    if settings["max_epochs"]:  # of data that a plan does not read
        steps = 0
    elif settings["max_tokens"]:
        steps = steps_of(settings["max_tokens"], wanted.sequences * settings["block_size"])
    if steps:
        took = duration(steps * fastest.total_s)
        whole_run = f", {count_text(steps, 'step')} in {took} without evaluations and checkpoints"
    print(f"\nthe fastest, predicted{whole_run}:\n{command}")
    return {"plans": [as_record(prediction) for prediction in rankings[0].predictions], "command": command}


def print_layouts(predictor: Predictor, ranking: Ranking) -> None:
    """
    Print the layouts as a table.

    Raises:
        ValueError: no layout fits.
    """
    wanted, per_node = ranking.wanted, predictor.per_node
    devices = f"{wanted.world_size} x {ranking.card}, {min(wanted.world_size, per_node)} on each machine"
    print(f"the global batch of {count_text(wanted.sequences, 'sequence')} on {devices}, predicted:")
    print(table(ranking.predictions, predictor.flops))
    check_fits(ranking.predictions, wanted, ranking.hardware, per_node)


def table(predictions: list[Prediction], flops: float) -> str:
    """Format the fastest layouts, and some layouts that do not fit. `flops`: the model's FLOPs per token."""
    best = best_of_layouts(predictions)
    fitting = [prediction for prediction in best if not prediction.problem]
    others = [prediction for prediction in best if prediction.problem]
    lines = [f"  {HEADER}"]
    for prediction in (*fitting[:ROWS], *others[:ROWS_THAT_DO_NOT_FIT]):
        line = f"  {figures(prediction, flops)}  {typed(prediction.settings)}"
        if why := reason(prediction, predictions[0]):
            line += f"  ({why})"
        lines.append(line)
    return "\n".join(lines)


def figures(prediction: Prediction, flops: float) -> str:
    """The time, speed, FLOP/s of each device and memory of a step."""
    if prediction.problem:
        return f"{'':31} {prediction.gb:6.1f}"
    tflops = prediction.tokens_per_s * flops / prediction.plan.world_size / 1e12
    speed = f"{prediction.total_s * 1e3:9,.1f} {prediction.tokens_per_s:12,.0f}"
    return f"{speed} {tflops:8.1f} {prediction.gb:6.1f}"


def as_record(prediction: Prediction) -> dict:
    """A prediction for the JSON file."""
    return {
        "settings": prediction.settings,
        "gb": prediction.gb,
        "seconds": prediction.seconds,
        "problem": prediction.problem,
        "total_s": None if prediction.problem else prediction.total_s,
    }


def compare_devices(predictor: Predictor, rankings: list[Ranking]) -> dict:
    """
    Print the fastest layout on each number of devices of each kind, the fastest first. Where no layout fits,
    the line says how many devices suffice.
    """
    # those on which no layout fits are last, smallest first
    rankings.sort(key=lambda ranking: (-ranking.predictions[0].tokens_per_s, ranking.predictions[0].gb))
    batches = sorted({ranking.wanted.sequences for ranking in rankings})
    batch = f"the global batch of {count_text(batches[0], 'sequence')}"
    if len(batches) > 1:
        batch = "a global batch that grows with the devices"
        if not predictor.workload.weak:  # nothing was set, and each process reads a micro-batch
            most = max(ranking.wanted.world_size for ranking in rankings)
            batch += f" (--gradient_accumulation_steps={most}: the same on any number)"
    print(f"{batch}, predicted:\n  {'devices':>15} {HEADER}")
    compared = []
    for ranking in rankings:
        n, best, fewest = ranking.wanted.world_size, ranking.predictions[0], 0
        text = typed(best.settings)
        if best.problem:
            fewest = smallest_world(ranking.wanted, ranking.hardware, predictor.per_node)
            text = "does not fit"
            if fewest:
                text += f"; the fewest devices on which a layout fits: {fewest}"
        print(f"  {f'{n} x {ranking.card}':>15} {figures(best, predictor.flops)}  {text}")
        compared.append({"devices": n, "hardware": ranking.card, "fewest": fewest} | as_record(best))
    fastest = f"--devices={rankings[0].wanted.world_size} --hardware={rankings[0].card}"
    print(f"\nfor all layouts of a line and its command, type for example {fastest}")
    return {"compared": compared}


def tune(predictor: Predictor, ranking: Ranking) -> dict:
    """Measure the best few layouts for the launched processes; print the fastest layout's command."""
    workload = predictor.workload
    print_layouts(predictor, ranking)
    fitting = [prediction for prediction in ranking.predictions if not prediction.problem]
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
