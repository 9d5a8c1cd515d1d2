"""Out of memory: explain why, and continue with smaller micro-batches at the next start."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from isogpt.common import console
from isogpt.data.reader import Reader
from isogpt.launch.process_group import rank_names
from isogpt.monitor.watchdog import Watchdog
from isogpt.speed.memory import OUT_OF_MEMORY, memory_report
from isogpt.speed.planner import MICRO_BATCH, record


def is_out_of_memory(error: BaseException) -> bool:
    """
    Return whether the device or the CPU ran out of memory. Libraries such as cuBLAS and NCCL raise a plain
    RuntimeError.
    """
    has_said_so = isinstance(error, RuntimeError) and OUT_OF_MEMORY.search(str(error))
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or bool(has_said_so)


@dataclass
class MemoryUse:
    """What explains why memory ran out, and makes the next start use less."""

    out_dir: str
    reader: Reader  # contains the plan, and the rows of each rank
    first_step: int  # the step at which this process starts


def explain_out_of_memory(watchdog: Watchdog, error: BaseException) -> None:
    """
    Print what uses the memory and what would reduce it. In the first steps, also record half of the rows as
    the micro-batch size, so that the same command, repeated or restarted by torchrun --max-restarts,
    continues.

    Often all ranks run out of memory, but it can also be one, since the last stage of a pipeline computes the
    loss, and other programs may use a GPU.
    """
    use = watchdog.memory_use
    is_allocating = watchdog.clock is None  # the model and the optimizer
    rows, most = use.reader.share.rows, max(use.reader.share.rows_of)
    cause = "while the model was allocated" if is_allocating else f"with micro-batches of {rows}"
    name = rank_names(watchdog.ranks.hosts)[watchdog.ranks.rank]
    source = f"{name}: " if watchdog.ranks.world_size > 1 else ""
    problem, hint = f"{source}out of memory {cause}: {line_of(error)}", ""
    if use.reader.plan.exact:
        hint = (
            "\nwith exact, a run keeps its micro-batch: halve --batch_size= and double "
            "--gradient_accumulation_steps= to start a new run, which has different bits"
        )
    elif watchdog.progress.step < use.first_step + 3 and most > 1 and not is_allocating:
        record(Path(use.out_dir) / MICRO_BATCH, use.reader.plan.job(), most // 2)
        hint = (
            f"\nthe next start in {use.out_dir} uses micro-batches of {most // 2} (same global batch, same "
            "curve): torchrun --max-restarts does so by itself, otherwise repeat the command"
        )
    report = memory_report(replace(use.reader.plan, micro_batch=rows))
    console.print_to_stderr(f"error: {problem}\n{report}{hint}")
    watchdog.logger.failed(problem)


def line_of(error: BaseException) -> str:
    """Return the line of an error's message that says that memory ran out, else the first line."""
    lines = str(error).splitlines() or [""]
    return next((line for line in lines if OUT_OF_MEMORY.search(line)), lines[0])
