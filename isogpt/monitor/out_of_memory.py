"""Out of memory: explain why, and continue with smaller micro-batches at the next start."""

from dataclasses import replace
from pathlib import Path

from isogpt.data.reader import Reader
from isogpt.speed.clock import Clock
from isogpt.speed.memory import OUT_OF_MEMORY, memory_report
from isogpt.speed.planner import MICRO_BATCH, record


def is_out_of_memory(error: BaseException) -> bool:
    """
    Return whether the device or the CPU ran out of memory. Libraries such as cuBLAS and NCCL raise a plain
    RuntimeError.
    """
    has_said_so = isinstance(error, RuntimeError) and OUT_OF_MEMORY.search(str(error))
    return isinstance(error, MemoryError) or bool(has_said_so)


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
    hint = ""
    is_early = clock and not clock.medians()  # the times of the first step are known after the third
    if is_early and most > 1 and not plan.exact:
        record(Path(out_dir) / MICRO_BATCH, plan.job(), most // 2)
        hint = (
            f"\nthe next start in {out_dir} uses micro-batches of {most // 2} (same global batch, "
            "same curve): torchrun --max-restarts does so by itself, otherwise repeat the command"
        )
    report = memory_report(replace(plan, micro_batch=rows))
    return f"out of memory {when}: {line_of(error)}\n{report}{hint}"


def line_of(error: BaseException) -> str:
    """Return the line of an error's message that says that memory ran out, else the first line."""
    lines = str(error).splitlines() or [""]
    return next((line for line in lines if OUT_OF_MEMORY.search(line)), lines[0])
