"""
Kill runs at random moments, many times, and count what was lost. The test suite runs a short form of it.

    python measure/soak.py saves --kills=200         SIGKILL around checkpoints: does the newest one resume?
    python measure/soak.py saves --nproc=2 --zero=3  the same for shards, killing one rank or all
    python measure/soak.py signals --kills=50        SIGTERM: checkpoint, exit within 10 s, same bits?
    python measure/soak.py elastic --kills=50        SIGKILL of workers of torchrun: same losses, how long?
    python measure/soak.py shrink                    agents are killed, 4 -> 3 -> 2 -> 3: same losses?

measure/random_layouts.py kills runs on random layouts.
"""

import argparse
import atexit
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from runs import (
    REPO,
    TINY,
    Zygote,
    assert_same_run,
    children,
    column,
    free_port,
    is_served,
    records,
    steps_in,
    tiny_data,
    wait_for,
)

from isogpt.checkpoint.search import find_checkpoint


def kill_around_saves(zygote, work, kills, seed=0, nproc=1, say=lambda *_: None, flags=()):
    """
    SIGKILL a run that writes a checkpoint at every step, `kills` times: after a random number of checkpoints,
    at a random moment within the time that one takes. After each kill the newest valid checkpoint must be at
    least as new as the last one that was completed (the run has printed 'saved'), and the next run must
    resume from it.
    """
    rng, report = random.Random(seed), dict(kills=0, older=0, failed=0, mid_save=0)
    big = ["--n_embd=128", "--n_layer=4"]  # a checkpoint takes some milliseconds, so kills hit it
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
        # all at once, or one rank first and the others when they have detected it
        run.kill(None if rng.random() < 0.5 else [rng.randrange(nproc)])
        if not run.gone(within=rng.random()):
            run.kill()
        run.wait(ok=False)
        text = run.text()
        resumed = re.search(r"step_(\d+)(?:/ckpt.pt)?, step", text)
        if report["kills"] and (not resumed or int(resumed[1]) < completed):
            report["older"] += 1
            say(f"resumed from {resumed and resumed[1]}, last completed {completed}")
        report["kills"] += 1
        report["mid_save"] += bool(list(out.glob("unfinished_*")))
        completed = max(completed, *(int(s) for s in re.findall(r"saved \S*step_(\d+)", text)))
        found, reports = find_checkpoint(str(out))
        if not found or found.step < completed or reports:
            report["older"] += 1
            say(f"found {found}, last completed {completed}, reports {reports}")
        if report["kills"] % 20 == 0:
            say(report)
    return report


def stop_at_random_moments(zygote, work, kills, nproc, seed):
    """
    SIGTERM to a random rank at random moments from the first step on, `kills` times in one run. Does it save
    the step that it was at and exit within 10 s each time, and does it end with the bits of an uninterrupted
    run?
    """
    from test_resume import DROPOUT

    rng, report = random.Random(seed), dict(signals=0, unsaved=0, late=0, slowest_s=0.0)
    args = [*TINY, *DROPOUT, f"--max_iters={40 * kills}", "--eval_interval=25", f"--out_dir=stop{nproc}"]
    while report["signals"] < kills:
        run = zygote.start([*args, "--init_from=auto"], work, nproc)
        assert run.until(lambda text: "iter " in text)
        time.sleep(rng.random() * 0.3)
        sent = time.monotonic()
        run.kill([rng.randrange(nproc)], signal.SIGTERM)
        left = run.gone(within=10)
        report["slowest_s"] = max(report["slowest_s"], time.monotonic() - sent)
        report["late"] += not left
        report["signals"] += 1
        run.wait(ok=False)
        steps = [int(n) for n in re.findall(r"iter (\d+):", run.text())]
        report["unsaved"] += not (work / f"stop{nproc}" / f"step_{max(steps) + 1:08d}").is_dir()
        if report["signals"] % 10 == 0:
            print(report)
    zygote.start([*args, "--init_from=auto"], work, nproc).wait(timeout=600)
    zygote.start([*args, f"--out_dir=straight{nproc}"], work, nproc).wait(timeout=600)
    assert_same_run(work / f"stop{nproc}", work / f"straight{nproc}")
    print(report, f"same bits as an uninterrupted run, on {nproc} processes")
    return report


AGENTS = []  # torchrun's, each in its own session


@atexit.register
def end_agents():
    """Kill what is still running when this process exits."""
    for agent in AGENTS:
        if agent.poll() is None:
            os.killpg(agent.pid, signal.SIGKILL)


def torchrun(work, args, agent_args, log):
    """Start a torchrun agent."""
    command = [sys.executable, "-m", "torch.distributed.run", *agent_args, str(REPO / "train.py"), *args]
    env = os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # docs/launchers.md
    AGENTS.append(
        subprocess.Popen(command, cwd=work, stdout=log, stderr=log, start_new_session=True, env=env)
    )
    return AGENTS[-1]


def kill_workers(work, kills, seed, nproc=4):
    """
    SIGKILL a random worker at a random moment, `kills` times; report the losses and the times to recover.
    """
    rng, took = random.Random(seed), []
    args = [*TINY, "--gradient_accumulation_steps=4", "--save_interval=10", "--eval_interval=100000"]
    args += ["--max_iters=2000", "--lr_decay_iters=2000"]
    straight = ["--standalone", f"--nproc_per_node={nproc}"]
    with open(work / "log", "w") as log:
        assert torchrun(work, [*args, "--out_dir=straight"], straight, log).wait(600) == 0
        agent_args = ["--nnodes=1:1", f"--nproc_per_node={nproc}", f"--max-restarts={kills}"]
        agent_args += ["--rdzv-backend=c10d"]
        agent_args += [f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-conf=last_call_timeout=1"]
        agent = torchrun(work, [*args, "--out_dir=killed", "--init_from=auto"], agent_args, log)
        for n in range(kills):
            wanted = steps_in(work / "killed") + rng.randrange(1, 30)
            wait_for(lambda w=wanted: steps_in(work / "killed") >= w or agent.poll() is not None, 120)
            assert agent.poll() is None, (work / "log").read_text()[-3000:]
            time.sleep(rng.random() * 0.05)
            os.kill(rng.choice(sorted(children(agent.pid))), signal.SIGKILL)
            killed = time.time()
            steps = wait_for(lambda k=killed: recoveries(work / "killed", k), 120)
            took.append(stamp(steps[0]) - killed)
            print(f"kill {n + 1}: {took[-1]:.1f} s until the next step")
        assert agent.wait(600) == 0
    one, other = column(work / "straight", "loss"), column(work / "killed", "loss")
    worst = max(abs(one[s] - other[s]) for s in one)
    print(
        f"{kills} kills of {nproc} workers: losses of {len(other)} steps within {worst:.2g} of the "
        "uninterrupted run; "
        f"from a kill to the next step: median {statistics.median(took):.1f} s, maximum {max(took):.1f} s"
    )
    return worst < 1e-5 and one.keys() == other.keys()


def shrink(zygote, work):
    """
    Four agents with one worker each: two are killed, one after the other. Then an agent comes back, and the
    run ends.
    """
    args = [*TINY, "--gradient_accumulation_steps=12", "--batch_size=4", "--save_interval=10"]
    args += ["--max_iters=2500", "--lr_decay_iters=2500", "--eval_interval=100000", "--dist_timeout_s=60"]
    zygote.start([*args, "--out_dir=straight"], work).wait(timeout=600)
    port = free_port()
    agent_args = ["--nnodes=2:4", "--nproc_per_node=1", "--max-restarts=10"]
    agent_args += ["--rdzv-backend=c10d", "--rdzv-id=shrink", f"--rdzv-endpoint=127.0.0.1:{port}"]
    agent_args += ["--rdzv-conf=last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3"]
    with open(work / "log", "w") as log:

        def start():
            return torchrun(work, [*args, "--out_dir=shrunk", "--init_from=auto"], agent_args, log)

        agents = [start()]
        wait_for(lambda: is_served(port))  # by the first agent, which is not killed
        agents += [start() for _ in range(3)]
        took = []
        for victim, at in ((3, 40), (2, 120)):
            wait_for(lambda a=at: steps_in(work / "shrunk") >= a, 180)
            agents[victim].kill()
            killed = time.time()
            wait_for(lambda k=killed: recoveries(work / "shrunk", k), 180)
            took.append(time.time() - killed)
            print(f"from the kill of an agent to the next step with fewer workers: {took[-1]:.1f} s")
        agents.append(start())  # a machine comes back
        grown = time.time()
        wait_for(lambda: world_sizes(work / "shrunk")[-1] == 3, 180)
        print(f"from the start of a new agent to three workers: {time.time() - grown:.1f} s")
        codes = [agents[i].wait(300) for i in (0, 1, 4)]
    sizes = world_sizes(work / "shrunk")
    one, other = column(work / "straight", "loss"), column(work / "shrunk", "loss")
    worst = max(abs(one[s] - other[s]) for s in one)
    print(
        f"world sizes {sizes}, agents ended with {codes}; losses within {worst:.2g} of an uninterrupted "
        "process"
    )
    return worst < 1e-5 and sizes[0] == 4 and 2 in sizes and sizes[-1] == 3


def recoveries(folder, since):
    """The steps since the last resume, if that is later than the time `since`."""
    lines = records(folder)
    resumes = [i for i, r in enumerate(lines) if r.get("event") == "resume" and stamp(r) > since]
    return [r for r in lines[resumes[-1] :] if "step_ms" in r] if resumes else []


def world_sizes(folder):
    """The world size of each start of a run."""
    return [r["world_size"] for r in records(folder) if r.get("event") in ("start", "resume")]


def stamp(record):
    """The time of a record, in seconds."""
    return datetime.fromisoformat(record["time"]).timestamp()


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["saves", "signals", "elastic", "shrink"])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--nproc", type=int, default=1, help="of saves")
    parser.add_argument("--zero", type=int, default=0, help="of saves")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    zygote = Zygote()
    with tempfile.TemporaryDirectory() as folder:
        tiny_data(folder)
        work, kills, seed = Path(folder), options.kills, options.seed
        if options.what == "saves":
            flags = [f"--zero={options.zero}"]
            report = kill_around_saves(zygote, work, kills, seed, options.nproc, print, flags)
            print(report)
            bad = report["older"] + report["failed"]
        elif options.what == "signals":
            reports = [stop_at_random_moments(zygote, work, kills, n, seed) for n in (1, 2)]
            bad = sum(r["unsaved"] + r["late"] for r in reports)
        elif options.what == "elastic":
            bad = not kill_workers(work, kills, seed)
        else:
            bad = not shrink(zygote, work)
    zygote.close()
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
