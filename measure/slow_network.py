"""
Train over slow links: each host is a network namespace with one core and one process (Linux, root, iproute2).

    python measure/slow_network.py --rate=100mbit --hosts=2 -- --zero=1  one run
    python measure/slow_network.py --table                               every mode at several rates

The table shows how long each mode needs to the training loss that DDP has after --steps steps. How many steps
that takes does not depend on the link and is measured once, without a limit; how long a step takes is
measured at each rate. The machine must be idle. Flags after -- go to train.py in either case, and replace
those in JOB.
"""

import itertools
import math
import os
import re
import signal
import sys
import tempfile
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from hosts import HAS_NAMESPACES, Hosts
from runs import column, tiny_data

# 10.65M parameters, 12 sequences per step over all hosts, and a constant learning rate: a mode may take any
# time
JOB = [
    "--n_layer=6",
    "--n_head=6",
    "--n_embd=384",
    "--block_size=64",
    "--batch_size=12",
    "--dropout=0",
    "--device=cpu",
]
JOB += ["--dtype=float32", "--gradient_accumulation_steps=1", "--learning_rate=1e-3", "--min_lr=1e-3"]
JOB += ["--warmup_iters=50", "--lr_decay_iters=50", "--eval_interval=1000000", "--eval_iters=1"]
JOB += ["--log_interval=1", "--save_checkpoint=False"]
# name: train.py's flags; N is the number of hosts. The first one determines the loss that the others have to
# reach.
MODES = {
    "DDP": "",
    "ZeRO-1": "--zero=1",
    "ZeRO-3": "--zero=3",
    "fp16": "--grad_compression=fp16",
    "bf16": "--grad_compression=bf16",
    "int8": "--grad_compression=int8",
    "PowerSGD, rank 4": "--grad_compression=powersgd:4",
    "local SGD, 8 steps": "--islands=N --local_steps=8 --outer_lr=1 --outer_momentum=0",
    "DiLoCo, 32 steps": "--islands=N --local_steps=32 --outer_lr=0.7 --outer_momentum=0.9",
}
WINDOW = 50  # steps over which losses are smoothed
LONGEST = 3  # a mode is given up after this many times --steps
WARM_UP, MEASURED = 4, 8  # steps before the step time is measured, and steps that are measured
numbers = itertools.count(1)


@dataclass
class Curve:
    """What a run has logged for each step, and the bytes that each host has sent, with headers."""

    losses: list[float]
    step_ms: list[float]
    sent: float = 0

    def smoothed(self) -> np.ndarray:
        """The mean of WINDOW losses, from step WINDOW - 1 on."""
        window = min(WINDOW, len(self.losses))
        return np.convolve(self.losses, np.ones(window) / window, "valid") if window else np.array([])

    def steps_to(self, loss: float) -> int | None:
        """After how many steps the smoothed loss is `loss` or less; None: never."""
        # modes that only round differently are equal
        reached = np.flatnonzero(self.smoothed() <= loss + 1e-4)
        return int(reached[0]) + min(WINDOW, len(self.losses)) if len(reached) else None


def train(hosts: Hosts, args: list[str], target: float = -math.inf) -> Curve:
    """Train on all hosts until the smoothed loss is `target` or the run ends. ValueError: train.py failed."""
    out_dir = hosts.work / f"out{next(numbers)}"
    for log in hosts.logs.values():
        log.unlink(missing_ok=True)
    sent, curve = sum(map(hosts.sent, hosts.spaces)), Curve([], [])
    processes = hosts.train([*args, f"--out_dir={out_dir}"])
    codes = {host: None for host in processes}
    while None in codes.values():
        time.sleep(1.0)  # reading the log takes time from the hosts' cores
        codes = {host: process.poll() for host, process in processes.items()}
        failed = [host for host, code in codes.items() if code]
        if (out_dir / "metrics.jsonl").exists():
            curve = Curve(*(list(column(out_dir, key).values()) for key in ("loss", "step_ms")))
        if failed or curve.steps_to(target):
            break
    hosts.end()
    for process in processes.values():
        process.wait()
    if failed:
        text = hosts.text(failed[0])
        message = re.search(r"^error: (.+)$", text, re.M)
        raise ValueError(f"{failed[0]}: {message[1] if message else text[-500:]}")
    curve.sent = (sum(map(hosts.sent, hosts.spaces)) - sent) / len(hosts.spaces)
    return curve


def sent_per_step(hosts: Hosts, args: list[str], curve: Curve) -> float:
    """MB that each host sends per step of a run, less those of the start, as a run of one step shows."""
    start = train(hosts, [*args, "--max_iters=0"])
    return (curve.sent - start.sent) / (len(curve.losses) - 1) / 1e6


def step_time(hosts: Hosts, args: list[str]) -> float:
    """Seconds of a step: the mean over whole periods of local_steps."""
    local_steps = [int(n) for n in re.findall(r"--local_steps=(\d+)", " ".join(args))]
    period = max(local_steps[-1:] + [1])
    steps = -(-MEASURED // period) * period
    curve = train(hosts, [*args, f"--max_iters={WARM_UP + steps - 1}"])
    return mean(curve.step_ms[-steps:]) / 1e3


def run_once(hosts: Hosts, args: list[str], rate: str) -> None:
    """One run at a rate: its steps, time, traffic and losses."""
    hosts.limit(rate)
    curve = train(hosts, args)
    took, sent = f"median {median(curve.step_ms):.1f} ms", sent_per_step(hosts, args, curve)
    where = f"{len(hosts.spaces)} hosts at {rate}"
    print(f"{len(curve.losses)} steps on {where}: {took}, {sent:.3f} MB sent per step and rank")
    print("losses:", " ".join(f"{loss:.4f}" for loss in curve.losses))


def run_table(hosts: Hosts, args: list[str], rates: list[str], steps: int) -> None:
    """Print a row for each mode. A mode that fails gets a row that says why."""
    target, first = -math.inf, {}
    for name, flags in MODES.items():
        mode = [*args, *flags.replace("=N", f"={len(hosts.spaces)}").split()]
        limit = steps if name == "DDP" else LONGEST * steps
        try:
            hosts.limit(None)  # what a slow link drops is sent again
            curve = train(hosts, [*mode, f"--max_iters={limit - 1}"], target)
            if name == "DDP":
                target = curve.smoothed()[-1]
                print(f"steps to a loss of {target:.3f}; at each rate ms per step, time and speed-up")
            reached = curve.steps_to(target)
            cells = [f"{sent_per_step(hosts, mode, curve):.3f} MB", f"{reached or f'not in {limit}'} steps"]
            for rate in rates:
                hosts.limit(rate)
                seconds = step_time(hosts, mode)
                total = reached * seconds if reached else math.nan
                first.setdefault(rate, total)
                cells += [rate, f"{seconds * 1e3:.0f}", f"{total:.1f} s", f"{first[rate] / total:.2f}x"]
        except ValueError as e:
            cells = [f"failed: {e}"]
        print(f"| {' | '.join([name, *cells])} |", flush=True)


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2, choices=(2, 3, 4), help="their number")
    parser.add_argument("--rate", default="100mbit", help="of each host's link, in one run")
    parser.add_argument("--table", action="store_true", help="compare the modes")
    parser.add_argument("--rates", default="1gbit,100mbit,25mbit", help="of the table")
    parser.add_argument("--steps", type=int, default=500, help="of DDP, whose loss the others have to reach")
    parser.add_argument("args", nargs="*", metavar="-- ARGS", help="train.py's configs and settings")
    options = parser.parse_args()
    if not HAS_NAMESPACES:
        sys.exit("network namespaces need Linux, root and iproute2")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # close the hosts
    with tempfile.TemporaryDirectory(prefix="slow_network_") as work:
        tiny_data(work, tokens=1_000_000)
        args, hosts = [*JOB, "--dataset=tiny", *options.args], Hosts(Path(work), options.hosts)
        try:
            if options.table:
                run_table(hosts, args, options.rates.split(","), options.steps)
            else:
                run_once(hosts, args, options.rate)
        except ValueError as e:
            sys.exit(f"error: {e}")
        finally:
            hosts.close()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # one core per host
    main()
