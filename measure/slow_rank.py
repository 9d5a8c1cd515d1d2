"""
How much unequal shares gain: two processes on a separate core each, and a busy loop on the second core
(Linux).

    python measure/slow_rank.py [ROUNDS]

Trains nanoGPT's small model for 100 steps with --shares=equal and auto, alternating. Prints tokens/s, the
ratio, the shares that auto measured, and the largest difference to the losses of one process.
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from runs import REPO, column, free_port
from slow_network import prepare_shakespeare

STEPS, TOKENS = 100, 48 * 64
JOB = [
    "--dataset=shakespeare_char",
    "--n_layer=4",
    "--n_head=4",
    "--n_embd=128",
    "--block_size=64",
    "--batch_size=24",
    "--gradient_accumulation_steps=2",
    "--dropout=0",
    "--learning_rate=1e-3",
    "--warmup_iters=10",
    "--device=cpu",
    "--dtype=float32",
    f"--max_iters={STEPS - 1}",
    "--eval_interval=1000000",
    "--eval_iters=1",
    "--log_interval=1",
    "--save_checkpoint=False",
]


def train(work: Path, shares: str, nproc: int) -> Path:
    """One run, rank r on core r; returns its folder."""
    out, processes = Path(tempfile.mkdtemp(dir=work)), []
    common = {
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
    }
    for rank in range(nproc):
        command = ["taskset", "-c", str(rank), sys.executable, str(REPO / "train.py"), *JOB]
        env = {**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        command += [f"--shares={shares}", f"--out_dir={out}"]
        processes.append(subprocess.Popen(command, cwd=work, env=env, stdout=subprocess.PIPE, text=True))
    texts = [process.communicate()[0] for process in processes]
    if codes := [process.returncode for process in processes if process.returncode]:
        sys.exit(f"train.py failed with --shares={shares}: exit status {codes[0]}")
    (out / "stdout").write_text(texts[0])
    return out


def tokens_per_s(out: Path) -> float:
    """The mean after the first ten steps."""
    return TOKENS / mean(list(column(out, "step_ms").values())[10:]) * 1e3


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # end the busy loop
    with tempfile.TemporaryDirectory(prefix="slow_rank_") as folder:
        work = Path(folder)
        prepare_shakespeare(work)
        one = column(train(work, "equal", 1), "loss")
        busy = subprocess.Popen(["taskset", "-c", "1", sys.executable, "-c", "while True: pass"])
        try:
            for _ in range(int(sys.argv[1]) if len(sys.argv) > 1 else 2):
                equal, auto = (train(work, shares, 2) for shares in ("equal", "auto"))
                slow, fast = tokens_per_s(equal), tokens_per_s(auto)
                difference = max(abs(loss - one[step]) for step, loss in column(auto, "loss").items())
                measured = re.search(r"--shares=(\S+)", (auto / "stdout").read_text())[1]
                print(
                    f"equal {slow:,.0f}, auto {fast:,.0f} tokens/s: {fast / slow:.2f}x with shares "
                    f"{measured}, "
                    f"losses within {difference:.1e}",
                    flush=True,
                )
        finally:
            busy.kill()


if __name__ == "__main__":
    main()
