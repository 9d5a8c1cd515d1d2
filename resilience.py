"""
What keeps a run alive, or says why it ended: out of memory in the first steps becomes a smaller micro-batch.
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch

RECORD = "micro_batch.json"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception means that the device, or the CPU, had no memory left."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


def recorded_micro_batch(out_dir: str, job: dict, batch_size: int) -> int:
    """
    The micro-batch to run with: batch_size, or the smaller one that an attempt at the same job, which ran out of
    memory, left in out_dir (rank 0). The settings stay as they are, and by law 1 so does the curve.
    """
    try:
        record = json.loads((Path(out_dir) / RECORD).read_text())
        return min(batch_size, int(record["micro_batch"])) if record["job"] == job else batch_size
    except (OSError, ValueError, KeyError, TypeError):
        return batch_size


def lost_connection(error: BaseException) -> bool:
    """Whether a collective failed because another rank is gone."""
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(
        s in text for s in ("closed by peer", "reset by peer", "remote peer")
    )


def explain_crashes(
    out_dir: str,
    job: dict,
    rows: int,
    rank: int,
    plain: type[Exception],
    is_early: Callable[[], bool],
    explain: Callable[[], str],
) -> None:
    """
    From now on, what ends the process is said in a line or two instead of a traceback where it is understood.

    An error of type `plain` says all by itself. A rank that lost the others says that another one failed. Out of
    memory (each rank leaves by itself: they all run out alike) rank 0 says what the parts are and what would help; in
    the first steps it also records half of `rows` as the micro-batch, so that the same command, typed again or
    restarted by torchrun --max-restarts, goes on.

    Args:
        job: what the record holds for.
        is_early: whether these are the first steps after a start.
        explain: the parts and the flags.
    """
    earlier = sys.excepthook

    def say(kind: type, error: BaseException, trace: object) -> None:
        if isinstance(error, plain):
            print(f"error: rank {rank}: {error}", file=sys.stderr, flush=True)
            return
        if lost_connection(error):
            print(f"rank {rank} lost the connection to another rank, which failed", file=sys.stderr, flush=True)
            return
        if not is_out_of_memory(error):
            earlier(kind, error, trace)
            return
        if rank > 0:  # the other ranks leave in silence
            return
        lines = [f"error: out of memory with micro-batches of {rows}: {str(error).splitlines()[0]}"]
        if is_early() and rows > 1:
            Path(out_dir).mkdir(parents=True, exist_ok=True)
            other = Path(out_dir) / (RECORD + ".tmp")
            other.write_text(json.dumps({"micro_batch": rows // 2, "job": job}))
            os.replace(other, Path(out_dir) / RECORD)
            lines.append(
                f"the next start in {out_dir} uses micro-batches of {rows // 2} (same steps, same curve): torchrun "
                f"--max-restarts does it by itself, else type the same command again"
            )
        try:
            lines.insert(1, explain())
        except Exception as e:  # the message above matters more
            lines.insert(1, f"(no estimate: {e})")
        print("\n".join(lines), file=sys.stderr, flush=True)

    def hook(kind: type, error: BaseException, trace: object) -> None:
        say(kind, error, trace)
        sys.stdout.flush()
        sys.stderr.flush()
        # at once: taking apart a process group that a DDP model still holds has been seen to hang (torch 2.13, gloo),
        # and a rank that hangs instead of failing keeps its launcher from restarting it
        os._exit(130 if issubclass(kind, KeyboardInterrupt) else 1)

    sys.excepthook = hook
