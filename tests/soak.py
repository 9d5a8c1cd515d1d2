"""
Kill runs at random moments, many times, and count what was lost. The test suite runs a short form of it.

    python tests/soak.py saves --kills=200       SIGKILL around saves: does the run resume, from the newest whole save?
    python tests/soak.py saves --kills=100 --nproc=2 --zero=3   the same for a save in shards, of one rank or of all
    python tests/soak.py bits --rounds=20        kills in the middle of steps: are the final bits a straight run's?
"""

import argparse
import random
import re
import sys
import tempfile
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

from runs import TINY, Zygote, tiny_data

import checkpoint


def kill_around_saves(zygote, work, kills, seed=0, nproc=1, say=lambda *_: None, flags=()):
    """
    SIGKILL a run that saves at every step, `kills` times, at moments spread over saving: after a random number of
    saves, at a random moment up to the time that one takes. After each, the newest good save must be at least the last
    one that was completed (announced by 'saved'), and the next run must go on from it.
    """
    rng, report = random.Random(seed), dict(kills=0, older=0, failed=0, mid_save=0)
    big = ["--n_embd=128", "--n_layer=4"]  # a save of some milliseconds, so that kills fall into it
    args = [*TINY, *big, "--out_dir=soak", "--init_from=auto", "--save_interval=1", "--max_iters=1000000"]
    args += ["--block_size=8", "--batch_size=1", "--gradient_accumulation_steps=2", *flags]
    out, completed = work / "soak", 0
    while report["kills"] < kills:
        run = zygote.start(args, work, nproc)
        wanted = rng.randint(1, 4)
        if not run.until(lambda text, n=wanted: text.count("saved ") >= n):
            report["failed"] += 1
            say(run.text()[-2000:])
            break
        time.sleep(rng.random() * 0.06)
        # all at once, or one rank first and the others when they have noticed
        run.kill(None if rng.random() < 0.5 else [rng.randrange(nproc)])
        if not run.gone(within=rng.random()):
            run.kill()
        run.wait(ok=False)
        text = run.text()
        resumed = re.search(r"step_(\d+)(?:/ckpt.pt)?, step", text)
        if report["kills"] and (not resumed or int(resumed[1]) < completed):
            report["older"] += 1
            say(f"resumed from {resumed and resumed[1]}, completed was {completed}")
        report["kills"] += 1
        report["mid_save"] += bool(list(out.glob("unfinished_*")))
        completed = max(completed, *(int(s) for s in re.findall(r"saved \S*step_(\d+)", text)))
        found, reports = checkpoint.newest(str(out))
        if not found or found.step < completed or reports:
            report["older"] += 1
            say(f"found {found}, completed was {completed}, reports {reports}")
        if report["kills"] % 20 == 0:
            say(report)
    return report


def kill_within_steps(zygote, work, rounds, nproc, seed=0, say=lambda *_: None):
    """Straight runs of 40 steps against ones killed twice: how many end in the same bits."""
    import torch
    from test_resume import DROPOUT, assert_same_bits

    rng, same = random.Random(seed), 0
    zygote.train([*DROPOUT, "--out_dir=straight"], work, nproc)
    straight = torch.load(work / "straight/ckpt.pt", weights_only=True)
    for n in range(rounds):
        args = [*TINY, *DROPOUT, f"--out_dir=killed{nproc}-{n}", "--init_from=auto"]
        for step in sorted(rng.sample(range(1, 38), 2)):
            run = zygote.start(args, work, nproc)
            run.until(lambda text, s=step: f"iter {s}:" in text)
            time.sleep(rng.random() * 0.02)
            run.kill()
            run.wait(ok=False)
        zygote.start(args, work, nproc).wait()
        assert_same_bits(straight, torch.load(work / f"killed{nproc}-{n}/ckpt.pt", weights_only=True))
        same += 1
    say(f"{nproc} processes: {same} of {rounds} runs, killed twice each, end in the same bits")
    return same


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["saves", "bits"])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--nproc", type=int, default=1)
    parser.add_argument("--zero", type=int, default=0)
    options = parser.parse_args()
    zygote = Zygote()
    with tempfile.TemporaryDirectory() as folder:
        tiny_data(folder)
        if options.what == "saves":
            report = kill_around_saves(
                zygote, Path(folder), options.kills, options.seed, options.nproc, print, [f"--zero={options.zero}"]
            )
            print(report)
            bad = report["older"] + report["failed"]
        else:
            counts = [
                kill_within_steps(zygote, Path(folder), options.rounds, n, options.seed, print) for n in (1, 2, 3, 4)
            ]
            bad = 4 * options.rounds - sum(counts)
    zygote.close()
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
