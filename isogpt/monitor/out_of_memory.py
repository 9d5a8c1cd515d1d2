"""Out of memory: explain why, and continue with smaller micro-batches at the next start."""

from dataclasses import replace
from pathlib import Path

from isogpt.data.reader import Reader
from isogpt.speed.clock import Clock
from isogpt.speed.memory import OUT_OF_MEMORY, memory_report
from isogpt.speed.planner import MICRO_BATCH, record


def line_of(error: BaseException) -> str:
    """
    Return an error's type and the first line of its message, or the line that says that memory ran out:
    libraries such as cuBLAS and NCCL raise a plain RuntimeError.
    """
    lines = f"{type(error).__name__}: {error}".removesuffix(": ").splitlines()
    return next(filter(OUT_OF_MEMORY.search, lines), lines[0])


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the device or the CPU ran out of memory."""
    return isinstance(error, MemoryError) or OUT_OF_MEMORY.search(line_of(error)) is not None


def use_less_memory(error: BaseException, out_dir: str, reader: Reader, clock: Clock | None) -> str:
    """
    Return what uses the memory and what would reduce it. In the first steps, also record half of the rows as
    the micro-batch size, so that the same command, repeated or restarted by torchrun --max-restarts,
    continues.

    Often all ranks run out of memory, but it can also be one, since the last stage of a pipeline computes the
    loss, and other programs may use a GPU.

    Args:
        clock: None: the model was being allocated.
    """
    plan, rows, most = reader.plan, reader.share.rows, max(reader.share.rows_of)
    when = f"with micro-batches of {rows}" if clock else "while the model was allocated"
    text = f"out of memory {when}: {line_of(error)}\n{memory_report(replace(plan, micro_batch=rows))}"
    # there are medians after three steps
    if clock and not clock.medians() and most > 1 and not plan.exact:
        record(Path(out_dir) / MICRO_BATCH, plan.job(), most // 2)
        text += f"\nthe next start in {out_dir} uses micro-batches of {most // 2}, with the same curve"
    return text
