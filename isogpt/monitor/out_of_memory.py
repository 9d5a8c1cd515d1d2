"""Out of memory: explain why, and continue with smaller micro-batches at the next start."""

import sys
from dataclasses import replace
from pathlib import Path

import torch

from isogpt.common import console
from isogpt.common.files import record
from isogpt.data.dataset import DataError
from isogpt.data.reader import Reader
from isogpt.launch.process_group import rank_names
from isogpt.monitor.watchdog import Watchdog, cause_of, explain_failure, install, line_of
from isogpt.speed.memory import OUT_OF_MEMORY, memory_report
from isogpt.speed.run_plan import MICRO_BATCH


def is_out_of_memory(error: BaseException) -> bool:
    """
    Whether the device or the CPU ran out of memory. Libraries such as cuBLAS and NCCL raise a plain
    RuntimeError.
    """
    has_said_so = isinstance(error, RuntimeError) and OUT_OF_MEMORY.search(str(error))
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or bool(has_said_so)


def explain_crashes(watchdog: Watchdog, out_dir: str, reader: Reader) -> None:
    """
    Install an excepthook that prints a message instead of a traceback if it can explain the exception. It
    replaces the hook of Watchdog.start, which explains lost ranks, as soon as it is known what takes memory.

    When memory runs out, the first rank with this problem prints what the memory consists of and what would
    reduce it. Often all ranks run out alike, but the last stage of a pipeline computes the loss, and other
    programs may use a GPU. In the first steps the rank also records half of the rows as the micro-batch size,
    so that the same command, repeated or restarted by torchrun --max-restarts, continues.

    Args:
        reader: contains the plan, and the rows of each rank.
    """
    first_step, rank = watchdog.progress.step, watchdog.ranks.rank

    def explain(kind: type, raised: BaseException, trace: object) -> None:
        error = cause_of(raised)
        if isinstance(error, DataError):
            console.print_error(str(error), f"rank {rank}: ")
            watchdog.logger.failed(str(error))
        elif not is_out_of_memory(error):
            explain_failure(watchdog, kind, raised, trace)
        elif watchdog.is_first("out of memory"):
            explain_out_of_memory(error)

    def explain_out_of_memory(error: BaseException) -> None:
        is_allocating = watchdog.clock.doing == "the start"  # allocating the model and the optimizer
        rows, most = reader.share.rows, max(reader.share.rows_of)
        cause = "while the model was allocated" if is_allocating else f"with micro-batches of {rows}"
        name = rank_names(watchdog.ranks.hosts)[rank]
        source = f"{name}: " if watchdog.ranks.world_size > 1 else ""
        problem, hint = f"error: {source}out of memory {cause}: {line_of(error)}", ""
        if watchdog.progress.step < first_step + 3 and most > 1 and not is_allocating:
            record(Path(out_dir) / MICRO_BATCH, reader.plan.job(), most // 2)
            hint = (
                f"\nthe next start in {out_dir} uses micro-batches of {most // 2} (same global batch, same "
                "curve): "
                "torchrun --max-restarts does so by itself, otherwise repeat the command"
            )
        print(
            f"{problem}\n{memory_report(replace(reader.plan, micro_batch=rows))}{hint}",
            file=sys.stderr,
            flush=True,
        )
        watchdog.logger.failed(problem)

    install(watchdog, explain)
