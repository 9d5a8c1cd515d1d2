"""bench.py's plans: the layouts of a workload, predicted for devices that need not be here, or measured."""

import json
import subprocess
import sys
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import NamedTuple

from isogpt.parallel.plan import Plan
from isogpt.speed.devices import Hardware, hardware_here, named_hardware
from isogpt.speed.launches import Launches
from isogpt.speed.layouts import best_of_layouts, check_fits, degrees, ranked, reason, smallest_world, typed
from isogpt.speed.prediction import Prediction, calibrated, two_blocks
from isogpt.speed.sweep import Table
from isogpt.speed.workload import Workload
from isogpt.training.settings import check_training


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
        launches: of train.py and bench.py, which measure this machine.
        per_node: devices of each machine.
        network_gbit, memory_gb, tflops: see devices.named_hardware.
    """

    workload: Workload
    launches: Launches
    bench_py: Path
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
        machine = self.measured_machine(wanted, on_machine) if card == "this" else None
        hardware = named_hardware(card, self.network_gbit, machine, self.memory_gb, self.tflops)
        return Ranking(wanted, card, hardware, ranked(wanted, hardware, on_machine))

    def measured_machine(self, wanted: Plan, n: int) -> Hardware:
        """Measure this machine with n processes: large operations, collectives, two of the model's blocks."""
        device, collectives = self.workload.device, []
        name = self.workload.settings["device"]
        if n > 1:
            path = self.launches.folder / "comm.json"
            settings = ["--comm", f"--nproc={n}", f"--device={name}", f"--json_path={path}"]
            command = [sys.executable, str(self.bench_py), *settings]
            subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
            collectives = json.loads(path.read_text())["comm"]
        machine = hardware_here(device, wanted.dtype, n, collectives)
        if device.type == "cuda":
            return machine
        settings = self.workload.without_weights() | two_blocks(wanted, n) | {"nproc": n}
        run = self.launches.run(settings, 5)
        if "problem" in run:
            return machine
        return calibrated(machine, wanted, n, run["step_ms"]["mean"] / 1e3)

    def command(self, layout: dict, n: int) -> str:
        """The command that trains with a layout on n devices."""
        return self.workload.command(layout, n, self.per_node, sys.argv[1:])


def print_ranking(predictor: Predictor, ranking: Ranking, flops: float) -> None:
    """
    Print the layouts as a table.

    Args:
        flops: the model's FLOPs per token.

    Raises:
        ValueError: no layout fits.
    """
    wanted, per_node = ranking.wanted, predictor.per_node
    n = wanted.world_size
    devices = f"{n} x {ranking.card}, {min(n, per_node)} on each machine"
    print(f"the global batch of {wanted.sequences} sequences on {devices}, predicted:")
    tokens = wanted.sequences * predictor.workload.settings["block_size"]
    print(table(ranking.predictions, tokens, n, flops))
    check_fits(ranking.predictions, wanted, ranking.hardware, per_node)


def report_plan(predictor: Predictor, ranking: Ranking, flops: float) -> dict:
    """Print the layouts, and the command of the fastest. `flops`: the model's FLOPs per token."""
    print_ranking(predictor, ranking, flops)
    fastest = ranking.predictions[0]
    command = predictor.command(fastest.settings, ranking.wanted.world_size)
    duration = duration_of_run(fastest.total_s, predictor.workload.settings["max_iters"])
    print(f"\nthe fastest, predicted{duration}:\n{command}")
    return {"plans": [as_record(prediction) for prediction in ranking.predictions], "command": command}


def duration_of_run(step_s: float, max_iters: float) -> str:
    """How long the run takes with steps of `step_s` seconds; empty if nothing sets max_iters."""
    if not max_iters:
        return ""
    steps = max_iters + 1  # as in nanoGPT
    minutes = steps * step_s / 60
    duration = f"{minutes:.1f} minutes" if minutes < 60 else f"{minutes / 60:,.1f} hours"
    return f", {steps:,} steps in {duration} without evaluations and checkpoints"


def as_record(prediction: Prediction) -> dict:
    """A prediction for the JSON file."""
    return {
        "settings": prediction.settings,
        "gb": prediction.gb,
        "seconds": prediction.seconds,
        "problem": prediction.problem,
        "total_s": None if prediction.problem else prediction.total_s,
    }


def compare_devices(predictor: Predictor, counts: list[int], cards: list[str]) -> dict:
    """
    Print the fastest layout on each number of devices of each kind, the fastest first. Where no layout fits,
    the line says how many devices suffice.
    """
    choices = []
    for n, card in product(counts, cards):
        ranking = predictor.rank(n, card)
        wanted, best = ranking.wanted, ranking.predictions[0]
        fewest = smallest_world(wanted, ranking.hardware, predictor.per_node) if best.problem else 0
        tokens = wanted.sequences * predictor.workload.settings["block_size"]
        choices.append(Choice(n, card, tokens, best, fewest))
    # those on which no layout fits are last, smallest first
    choices.sort(key=lambda choice: (-choice.tokens_per_s, choice.best.gb))
    batch = f"the global batch of {wanted.sequences} sequences"
    if len({choice.tokens for choice in choices}) > 1:
        batch = "a global batch that grows with the devices"
        if not predictor.workload.weak:  # nothing was set, and each process reads a micro-batch
            batch += f" (--gradient_accumulation_steps={max(counts)}: the same on any number)"
    print(f"{batch}, predicted:")
    print(table_of_choices(choices))
    if choices[0].tokens_per_s:
        fastest = f"--devices={choices[0].devices} --hardware={choices[0].hardware}"
        print(f"\nall layouts, and the command: choose one line, such as {fastest}")
    return {
        "compared": [
            {
                "devices": choice.devices,
                "hardware": choice.hardware,
                "tokens": choice.tokens,
                "found": as_record(choice.best),
                "fewest": choice.fewest,
            }
            for choice in choices
        ]
    }


def tune(predictor: Predictor, ranking: Ranking, flops: float) -> dict:
    """
    Measure the best few layouts for the launched processes; print the fastest layout's command.

    Args:
        flops: the model's FLOPs per token.
    """
    workload = predictor.workload
    print_ranking(predictor, ranking, flops)
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


# ------------------------------------------------------------------------------------------------------------
# tables


def table(predictions: list[Prediction], tokens: int, devices: int, flops: float, rows: int = 15) -> str:
    """
    Format the fastest layouts, and some layouts that do not fit.

    Args:
        predictions: fastest first.
        tokens: tokens per step.
        flops: the model's FLOPs per token; the table shows FLOP/s per device.
    """
    lines = [f"  {'ms/step':>9} {'tokens/s':>12} {'TFLOP/s':>8} {'GB':>6}  settings (why they are slower)"]
    best = best_of_layouts(predictions)
    fitting = [prediction for prediction in best if not prediction.problem]
    others = [prediction for prediction in best if prediction.problem]
    for prediction in (*fitting[:rows], *others[:3]):
        figures = " " * 31
        if not prediction.problem:
            speed = tokens / prediction.total_s
            figures = f"{prediction.total_s * 1e3:9,.1f} {speed:12,.0f} {speed * flops / devices / 1e12:8.1f}"
        why = reason(prediction, predictions[0])
        settings = typed(prediction.settings)
        lines.append(f"  {figures} {prediction.gb:6.1f}  {settings}{f'  ({why})' if why else ''}")
    return "\n".join(lines)


class Choice(NamedTuple):
    """The fastest layout on a number of devices of a kind."""

    devices: int
    hardware: str
    tokens: int  # per step
    best: Prediction  # the smallest layout if none fits
    fewest: int  # if none fits: how many devices suffice (0: unknown)

    @property
    def tokens_per_s(self) -> float:
        """The speed; 0 if no layout fits."""
        return 0.0 if self.best.problem else self.tokens / self.best.total_s


def table_of_choices(choices: list[Choice]) -> str:
    """Format a line for each number of devices of each kind, in order."""
    columns = f"{'ms/step':>12} {'tokens/s':>12} {'per device':>12} {'GB':>6}  fits  settings"
    lines = [f"  {'devices':>15} {columns}"]
    for choice in choices:
        best, name = choice.best, f"{choice.devices} x {choice.hardware}"
        if best.problem:
            needs = f"{choice.fewest} devices are the fewest on which a layout fits" if choice.fewest else ""
            lines.append(f"  {name:>15} {'':38} {best.gb:6.1f}  no    {needs}".rstrip())
        else:
            speed = choice.tokens_per_s
            figures = f"{best.total_s * 1e3:12,.1f} {speed:12,.0f} {speed / choice.devices:12,.0f}"
            lines.append(f"  {name:>15} {figures} {best.gb:6.1f}  yes   {typed(best.settings)}")
    return "\n".join(lines)
