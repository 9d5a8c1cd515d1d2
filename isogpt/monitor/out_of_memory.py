"""Out of memory: explain why, and continue with smaller micro-batches at the next start."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from isogpt.data.reader import Reader
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

    def explain(self, error: BaseException, step: int, is_allocating: bool) -> str:
        """
        Return what uses the memory and what would reduce it. In the first steps, also record half of the rows
        as the micro-batch size, so that the same command, repeated or restarted by torchrun --max-restarts,
        continues.

        Often all ranks run out of memory, but it can also be one, since the last stage of a pipeline computes
        the loss, and other programs may use a GPU.
        """
        plan, rows, most = self.reader.plan, self.reader.share.rows, max(self.reader.share.rows_of)
        when = "while the model was allocated" if is_allocating else f"with micro-batches of {rows}"
        hint = ""
        if step < self.first_step + 3 and most > 1 and not (plan.exact or is_allocating):
            record(Path(self.out_dir) / MICRO_BATCH, plan.job(), most // 2)
            hint = (
                f"\nthe next start in {self.out_dir} uses micro-batches of {most // 2} (same global batch, "
                "same curve): torchrun --max-restarts does so by itself, otherwise repeat the command"
            )
        report = memory_report(replace(plan, micro_batch=rows))
        return f"out of memory {when}: {line_of(error)}\n{report}{hint}"


def line_of(error: BaseException) -> str:
    """Return the line of an error's message that says that memory ran out, else the first line."""
    lines = str(error).splitlines() or [""]
    return next((line for line in lines if OUT_OF_MEMORY.search(line)), lines[0])
