"""
Kill sweep.py at random moments, and repeat its command after each kill: do its runs end with the bits of a
sweep that was never disturbed? The test suite runs a short form of it.

    python measure/sweep_kills.py                20 kills, of sweep.py alone or with its runs
    python measure/sweep_kills.py --forked       the same, with runs that need not import torch
"""

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from runs import TINY, Zygote, children, column, steps_in, tiny_data

LISTS = ["--learning_rate=1e-3,3e-3", "--seed=1,2", "--jobs=2"]
RUN = ["--dropout=0.1", "--eval_interval=20", "--save_interval=5"]


def steps_of(out):
    """The steps that all runs of a sweep have logged."""
    return sum(steps_in(folder) + 1 for folder in out.glob("*"))


def kill_sweep(zygote, work, kills, seed=0, script="sweep.py", steps=60, say=print):
    """
    SIGKILL a sweep of four runs at `kills` random moments: up to a second after its runs have taken a random
    number of steps. At random, its runs are killed with it. The command is then repeated at once.
    Returns what differs from an undisturbed sweep, a sentence for each difference, and the number of kills of
    the sweep alone.
    """
    rng, args = random.Random(seed), [*TINY, *RUN, f"--max_iters={steps - 1}", *LISTS]
    zygote.start([*args, "--out_dir=straight"], work, script=script).wait(600)
    out, alone = work / "killed", 0
    for number, moment in enumerate(sorted(rng.randrange(4 * steps) for _ in range(kills)), 1):
        sweep = zygote.start([*args, "--out_dir=killed"], work, script=script)
        end = time.monotonic() + 600
        while steps_of(out) < moment and not sweep.poll() and time.monotonic() < end:
            time.sleep(0.01)
        time.sleep(rng.random())
        is_alone, runs = rng.random() < 0.5, children(sweep.pids[0]) if not sweep.poll() else []
        sweep.kill()
        for run in [] if is_alone else runs:
            with suppress(ProcessLookupError):
                os.kill(run, signal.SIGKILL)
        sweep.wait(ok=False)
        alone += is_alone
        say(
            f"kill {number} of {'the sweep' if is_alone else 'the sweep and its runs'}: {steps_of(out)} steps"
        )
    last = zygote.start([*args, "--out_dir=killed"], work, script=script).wait(600)
    say(last.text())
    return differences(work / "straight", out), alone


def differences(straight, out):
    """What differs between the runs of two sweeps, a sentence for each."""
    import torch

    names, found = sorted(path.name for path in straight.glob("*")), []
    if names != sorted(path.name for path in out.glob("*")):
        found.append(f"the sweeps have different runs: {names}")
    for name in names:
        one, other = (torch.load(folder / name / "ckpt.pt", weights_only=True) for folder in (straight, out))
        weights = one["model"]
        if weights.keys() != other["model"].keys() or one["iter_num"] != other["iter_num"]:
            found.append(f"{name}: the checkpoints contain different tensors or steps")
        elif not all(torch.equal(weights[key], other["model"][key]) for key in weights):
            found.append(f"{name}: the weights differ")
        for key in ("loss", "val_loss", "train_loss"):
            if column(straight / name, key) != column(out / name, key):
                found.append(f"{name}: {key} differs")
    return found


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--forked", action="store_true")
    options = parser.parse_args()
    script = "tests/forked_sweep.py" if options.forked else "sweep.py"
    zygote = Zygote()
    with tempfile.TemporaryDirectory() as folder:
        tiny_data(folder)
        found, alone = kill_sweep(zygote, Path(folder), options.kills, options.seed, script)
    zygote.close()
    print("\n".join(found) or "the weights and losses of all runs have the bits of an undisturbed sweep")
    print(f"{options.kills} kills, {alone} of them of sweep.py alone")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
