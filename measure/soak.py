"""
Kill runs at random moments, many times, and count what was lost.

    python measure/soak.py saves --kills=200         SIGKILL around checkpoints: does the newest one resume?
    python measure/soak.py saves --nproc=2 --zero=3  the same for shards, killing one rank or all
    python measure/soak.py signals --kills=50        SIGTERM: checkpoint, exit within 10 s, same bits?
    python measure/soak.py elastic --kills=50        SIGKILL of workers of torchrun: same losses, how long?
    python measure/soak.py shrink                    agents are killed, 4 -> 3 -> 2 -> 3: same losses?
"""

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
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from datetime import datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from runs import (
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


def kill_around_saves(zygote, work, rng, kills, nproc=1, flags=()):
    """
    SIGKILL a run that writes a checkpoint at every step, `kills` times: after a random number of checkpoints,
    at a random moment within the time that one takes. After each kill the newest valid checkpoint must be at
    least as new as the last one that was completed (the run has printed 'saved'), and the next run must
    resume from it. Returns how often this was not so.
    """
    out, completed, older, mid_save = work / "soak", 0, 0, 0
    # a checkpoint takes some milliseconds, so kills hit it
    shape = "--n_embd=128 --n_layer=4 --block_size=8 --batch_size=1 --gradient_accumulation_steps=2"
    saves = f"--out_dir={out} --init_from=auto --save_interval=1 --max_iters=1000000"
    args = [*TINY, *saves.split(), *shape.split(), *flags]
    for kill in range(kills):
        run, wanted = zygote.start(args, work, nproc), rng.randint(1, 4)
        assert run.until(lambda text, n=wanted: text.count("saved ") >= n), run.text()[-2000:]
        time.sleep(rng.random() * 0.06)
        # all at once, or one rank first and the others when they have detected it
        run.kill(None if rng.random() < 0.5 else [rng.randrange(nproc)])
        if not run.gone(within=rng.random()):
            run.kill()
        text = run.wait(ok=False).text()
        resumed = re.search(r"step_(\d+)(?:/ckpt.pt)?, step", text)
        is_older = kill > 0 and (not resumed or int(resumed[1]) < completed)
        mid_save += bool(list(out.glob("unfinished_*")))
        completed = max(completed, *(int(step) for step in re.findall(r"saved \S*step_(\d+)", text)))
        found, reports = find_checkpoint(str(out))
        older += is_older or not found or found.step < completed or bool(reports)
    print(f"{kills} kills, {mid_save} of them during a save: {older} times, a checkpoint was lost")
    return older


def stop_at_random_moments(zygote, work, rng, kills, nproc):
    """
    SIGTERM to a random rank at random moments from the first step on, `kills` times in one run. Returns how
    often it did not save the step that it was at, or did not exit within 10 s; it must end with the bits of
    an uninterrupted run.
    """
    stopped, straight, bad, slowest_s = work / f"stop{nproc}", work / f"straight{nproc}", 0, 0.0
    args = [*TINY, "--dropout=0.1", f"--max_iters={40 * kills}", "--eval_interval=25", "--init_from=auto"]
    for _ in range(kills):
        run = zygote.start([*args, f"--out_dir={stopped}"], work, nproc)
        assert run.until(lambda text: "iter " in text)
        time.sleep(rng.random() * 0.3)
        sent = time.monotonic()
        run.kill([rng.randrange(nproc)], signal.SIGTERM)
        bad += not run.gone(within=10)
        slowest_s = max(slowest_s, time.monotonic() - sent)
        steps = [int(n) for n in re.findall(r"iter (\d+):", run.wait(ok=False).text())]
        bad += not (stopped / f"step_{max(steps) + 1:08d}").is_dir()
    for out in (stopped, straight):
        zygote.start([*args, f"--out_dir={out}"], work, nproc).wait(timeout=600)
    assert_same_run(stopped, straight)
    print(f"{nproc} processes: {bad} of {kills} late or not saved, at most {slowest_s:.2f} s; the same bits")
    return bad


AGENTS = []  # torchrun's, each in its own session


@atexit.register
def end_agents():
    """Kill what is still running when this process exits."""
    for agent in AGENTS:
        if agent.poll() is None:
            os.killpg(agent.pid, signal.SIGKILL)


def torchrun(work, args, *agent_args):
    """Start a torchrun agent, whose output goes to the file log."""
    command = [sys.executable, "-m", "torch.distributed.run", *agent_args, str(ROOT / "train.py"), *args]
    env = os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # docs/launchers.md
    with open(work / "log", "a") as log:
        out = {"stdout": log, "stderr": log}
        AGENTS.append(subprocess.Popen(command, cwd=work, start_new_session=True, env=env, **out))
    return AGENTS[-1]


def seconds_to_next_step(folder, since):
    """Wait for a step after a resume that is later than the time `since`; returns the seconds between."""

    def steps():
        lines = records(folder)
        resumes = [i for i, r in enumerate(lines) if r.get("event") == "resume" and stamp(r) > since]
        return [r for r in lines[resumes[-1] :] if "step_ms" in r] if resumes else []

    return stamp(wait_for(steps, 180)[0]) - since


def stamp(record):
    """The time of a record, in seconds."""
    return datetime.fromisoformat(record["time"]).timestamp()


def differs(one, other):
    """Print by how much the losses of two runs differ; returns whether it is more than rounding."""
    one, other = column(one, "loss"), column(other, "loss")
    worst = max(abs(one[step] - other[step]) for step in one)
    print(f"losses of {len(other)} steps within {worst:.2g} of those of the uninterrupted run")
    return worst > 1e-5 or one.keys() != other.keys()


def kill_workers(work, rng, kills, nproc=4):
    """SIGKILL a random worker at a random moment, `kills` times."""
    out, straight, took = work / "killed", work / "straight", []
    steps = "--gradient_accumulation_steps=4 --max_iters=2000 --lr_decay_iters=2000 --init_from=auto"
    args = [*TINY, *steps.split(), "--save_interval=10", "--eval_interval=100000"]
    workers = f"--nproc_per_node={nproc}"
    assert torchrun(work, [*args, f"--out_dir={straight}"], "--standalone", workers).wait(600) == 0
    elastic = f"--nnodes=1:1 {workers} --max-restarts={kills} --rdzv-backend=c10d"
    elastic += f" --rdzv-endpoint=127.0.0.1:{free_port()} --rdzv-conf=last_call_timeout=1"
    agent = torchrun(work, [*args, f"--out_dir={out}"], *elastic.split())
    for _ in range(kills):
        wanted = steps_in(out) + rng.randrange(1, 30)
        wait_for(lambda step=wanted: steps_in(out) >= step or agent.poll() is not None, 120)
        assert agent.poll() is None, (work / "log").read_text()[-3000:]
        time.sleep(rng.random() * 0.05)
        os.kill(rng.choice(sorted(children(agent.pid))), signal.SIGKILL)
        took.append(seconds_to_next_step(out, time.time()))
    assert agent.wait(600) == 0
    print(f"{kills} kills: {statistics.median(took):.1f} s to the next step, at most {max(took):.1f} s")
    return differs(straight, out)


def shrink(zygote, work):
    """
    Four agents with one worker each: two are killed, one after the other. Then an agent comes back, and the
    run ends.
    """
    out, straight, port = work / "shrunk", work / "straight", free_port()
    steps = "--gradient_accumulation_steps=12 --max_iters=2500 --lr_decay_iters=2500 --init_from=auto"
    args = [*TINY, *steps.split(), "--save_interval=10", "--eval_interval=100000", "--dist_timeout_s=60"]
    zygote.start([*args, f"--out_dir={straight}"], work).wait(timeout=600)
    elastic = [
        "--nnodes=2:4",
        "--nproc_per_node=1",
        "--max-restarts=10",
        "--rdzv-backend=c10d",
        "--rdzv-id=shrink",
    ]
    elastic.append(f"--rdzv-endpoint=127.0.0.1:{port}")
    elastic.append("--rdzv-conf=last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3")
    agents = [torchrun(work, [*args, f"--out_dir={out}"], *elastic)]
    wait_for(lambda: is_served(port))  # by the first agent, which is not killed
    agents += [torchrun(work, [*args, f"--out_dir={out}"], *elastic) for _ in range(3)]
    for victim, at in ((3, 40), (2, 120)):
        wait_for(lambda step=at: steps_in(out) >= step, 180)
        agents[victim].kill()
        took = seconds_to_next_step(out, time.time())
        print(f"from the kill of an agent to the next step with fewer workers: {took:.1f} s")
    agents.append(torchrun(work, [*args, f"--out_dir={out}"], *elastic))  # a machine comes back
    began = time.time()
    wait_for(lambda: world_sizes(out)[-1] == 3, 180)
    print(f"from the start of a new agent to three workers: {time.time() - began:.1f} s")
    codes = [agents[i].wait(300) for i in (0, 1, 4)]
    sizes = world_sizes(out)
    print(f"world sizes {sizes}, agents ended with {codes}")
    return differs(straight, out) or sizes[0] != 4 or 2 not in sizes or sizes[-1] != 3


def world_sizes(folder):
    """The world size of each start of a run."""
    return [r["world_size"] for r in records(folder) if r.get("event") in ("start", "resume")]


def main():
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["saves", "signals", "elastic", "shrink"])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--nproc", type=int, default=1, help="of saves")
    parser.add_argument("--zero", type=int, default=0, help="of saves")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    zygote, rng, kills = Zygote(), random.Random(options.seed), options.kills
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        tiny_data(work)
        if options.what == "saves":
            flags = [f"--zero={options.zero}"]
            is_bad = kill_around_saves(zygote, work, rng, kills, options.nproc, flags)
        elif options.what == "signals":
            is_bad = sum([stop_at_random_moments(zygote, work, rng, kills, n) for n in (1, 2)])
        elif options.what == "elastic":
            is_bad = kill_workers(work, rng, kills)
        else:
            is_bad = shrink(zygote, work)
    zygote.close()
    sys.exit(bool(is_bad))


if __name__ == "__main__":
    main()
