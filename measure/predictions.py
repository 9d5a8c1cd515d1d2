"""
Predictions and measurements: train.py on this machine in many layouts, each with two models (Linux, root,
iproute2 for the runs over a link). It needs an idle machine and takes a quarter of an hour.

    python measure/predictions.py [NPROC ...]     only runs with these numbers of processes
"""

import json
import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import numpy as np
import torch
from hosts import Hosts
from runs import REPO, column, tiny_data
from slow_network import train

from configurator import settings_of
from isogpt.nn.counts import count_on_meta
from isogpt.parallel.plan import Plan, plan_of
from isogpt.speed import prediction
from isogpt.speed.devices import Hardware, Link, hardware_here, measured_link
from isogpt.training.settings import model_args_of
from model import GPT, GPTConfig

STEPS, WARM_UP = 7, 3
COMMON = {
    "dropout": 0.0,
    "device": "cpu",
    "dtype": "float32",
    "eval_interval": 10**6,
    "eval_iters": 1,
    "log_interval": 1,
    "save_checkpoint": False,
    "max_iters": STEPS + WARM_UP - 1,
    "dataset": "tiny",
}
MODELS = {
    "gpt2": dict(
        n_layer=6, n_head=6, n_embd=384, block_size=256, batch_size=2, gradient_accumulation_steps=4
    ),
    "llama": dict(
        arch="llama",
        n_layer=8,
        n_head=8,
        n_embd=256,
        block_size=512,
        batch_size=1,
        gradient_accumulation_steps=8,
    ),
}
EXPERTS = {"n_expert": 4}
LAYOUTS = (
    (1, {}),
    (1, {"activation_checkpointing": "full"}),
    (1, EXPERTS),
    (2, {}),
    (2, {"zero": 1}),
    (2, {"zero": 2}),
    (2, {"zero": 3}),
    (2, {"tp": 2}),
    (2, {"cp": 2}),
    (2, {"pp": 2}),
    (2, {"pp": 2, "pp_schedule": "zbv"}),
    (2, {"ep": 2, **EXPERTS}),
    (4, {}),
    (4, {"zero": 3}),
    (4, {"zero": 3, "dp_replicate": 2}),
    (4, {"tp": 2}),
    (4, {"pp": 2, "tp": 2}),
    (4, {"cp": 2, "zero": 2}),
    (8, {"zero": 1}),
    (8, {"tp": 2, "pp": 2}),
)
OVER_A_LINK = ({}, {"zero": 1}, {"zero": 3})  # two hosts of one process, 1 Gbit/s
DEFAULTS = {name: setting.default for name, setting in settings_of(REPO / "train.py").items()}


def plan_with(settings: dict, nproc: int) -> Plan:
    """The plan of a run with these settings."""
    config = DEFAULTS | COMMON | settings
    args = asdict(GPTConfig(**model_args_of(config, 65)))
    counts = count_on_meta(GPT, args)
    return plan_of(config, 1, model_args=args, counts=counts, dtype="float32", world_size=nproc)


def flags(settings: dict) -> list[str]:
    return [f"--{name}={value}" for name, value in (COMMON | settings).items()]


def figures(out: Path) -> tuple[float, float]:
    """(median seconds of a step, GB of the largest rank)."""
    return median(list(column(out, "step_ms").values())[WARM_UP:]) / 1e3, max(
        column(out, "memory_gb_max").values()
    )


def measured_here(work: Path, settings: dict, nproc: int) -> tuple[float, float]:
    """Train with `nproc` processes of this machine."""
    out = Path(tempfile.mkdtemp(dir=work))
    launch = [f"--nproc={nproc}"] if nproc > 1 else []
    command = [sys.executable, str(REPO / "train.py"), *flags(settings), *launch, f"--out_dir={out}"]
    run = subprocess.run(command, cwd=work, capture_output=True, text=True)
    if run.returncode:
        sys.exit(f"{settings}: {run.stderr[-1500:]}")
    return figures(out)


def measured_over_a_link(work: Path, settings: dict, hosts: Hosts) -> tuple[float, float]:
    """Train with a process on each host."""
    before = {path.name for path in work.iterdir()}
    train(hosts, flags(settings))
    (out,) = (path for path in work.iterdir() if path.name not in before and path.name.startswith("out"))
    return figures(out)


def machine_of(model: dict, nproc: int, work: Path) -> Hardware:
    """This machine with `nproc` processes, as bench.py --plan measures it."""
    link = None
    if nproc > 1:
        command = [sys.executable, str(REPO / "bench.py"), "--comm", f"--nproc={nproc}", "--device=cpu"]
        command += [f"--json_path={work / 'comm.json'}"]
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True, cwd=work)
        link = measured_link(json.loads((work / "comm.json").read_text())["comm"])
    two = prediction.two_blocks(plan_with(model, nproc), nproc)
    settings = {name: value for name, value in vars(two).items() if name in DEFAULTS}
    seconds, _ = measured_here(work, model | settings | {"n_layer": 2}, nproc)
    machine = hardware_here(torch.device("cpu"), "float32", nproc, link)
    return prediction.calibrated(machine, two, seconds)


def ranks(values: list[float]) -> np.ndarray:
    return np.argsort(np.argsort(values))


def main() -> None:
    wanted = [int(n) for n in sys.argv[1:]] or [1, 2, 4, 8, 0]
    rows = []  # (group, time predicted, measured, memory predicted, measured)
    with tempfile.TemporaryDirectory(prefix="predictions_") as folder, ExitStack() as stack:
        work = Path(folder)
        tiny_data(work)
        print(
            "| processes | model | layout | ms predicted | measured | | GB predicted | measured | |\n|"
            + "---|" * 9
        )

        hosts = None
        for nproc in wanted:
            here = nproc or 2
            hw = {name: machine_of(model, here, work) for name, model in MODELS.items()}
            layouts = [layout for n, layout in LAYOUTS if n == nproc] or OVER_A_LINK
            if nproc == 0:  # two hosts of one process
                os.environ["OMP_NUM_THREADS"] = "1"
                hosts = Hosts(work, 2)
                stack.callback(hosts.close)
                hosts.limit("1gbit")
                slow = Link(1e-4, 1e9 / 8 * 0.94)
                hw = {name: replace(machine, network=slow) for name, machine in hw.items()}
            place = "2 hosts" if hosts else str(nproc)
            for layout, (name, model) in product(layouts, MODELS.items()):
                plan = prediction.predict(plan_with(model | layout, here), hw[name], 1 if hosts else nproc)
                measure = measured_over_a_link if hosts else measured_here
                seconds, gb = measure(work, model | layout, hosts or nproc)
                rows.append(((place, name), plan.total_s, seconds, plan.gb, gb, layout))
                text = " ".join(f"--{key}={value}" for key, value in layout.items())
                time = f"{plan.total_s * 1e3:.0f} | {seconds * 1e3:.0f} | {plan.total_s / seconds - 1:+.0%}"
                size = f"{plan.gb:.2f} | {gb:.2f} | {plan.gb / gb - 1:+.0%}"
                print(f"| {place} | {name} | `{text}` | {time} | {size} |", flush=True)
    predicted, measured, gb, gb_measured = (np.array(values) for values in list(zip(*rows, strict=True))[1:5])
    error, gb_error = predicted / measured - 1, gb / gb_measured - 1
    correlation = np.corrcoef(ranks(predicted), ranks(measured))[0, 1]
    medians = f"time {np.median(abs(error)):.0%}, memory {np.median(abs(gb_error)):.0%}"
    print(f"\n{len(rows)} runs, median errors: {medians}; memory at least {gb_error.min():+.0%}")
    print(f"rank correlation of time {correlation:.2f}")
    for group in dict.fromkeys(row[0] for row in rows):
        ours = [row for row in rows if row[0] == group and "n_expert" not in row[5]]
        best = min(ours, key=lambda row: row[1])
        place = sorted(ours, key=lambda row: row[2]).index(best) + 1
        print(
            f"{' '.join(group)}: the best predicted layout {best[5]} is number {place} of {len(ours)} "
            "measured"
        )


if __name__ == "__main__":
    main()
