"""Save a run on any layout, in the background."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from isogpt.checkpoint.ckpt_file import nanogpt_state, write_file
from isogpt.checkpoint.commit import commit_checkpoint
from isogpt.checkpoint.folder import RunFolder, is_sharded, mark_preempted
from isogpt.checkpoint.manifest import make_manifest, read_manifest, step_folder, unfinished_folder
from isogpt.checkpoint.mirror import Mirror
from isogpt.checkpoint.owner import check_owner
from isogpt.checkpoint.source import names_of_not_finite
from isogpt.checkpoint.state import TrainState
from isogpt.common import console
from isogpt.common.console import shortened
from isogpt.common.files import reason_of, remove
from isogpt.data.vocabulary import Vocabulary
from isogpt.launch.together import do_together, exit_together, is_main, wait_together
from isogpt.parallel.mesh import Mesh
from isogpt.parallel.plan import Plan


@dataclass
class Saver:
    """
    Write one checkpoint at a time, in the background. Older checkpoints are deleted only when a new
    checkpoint is complete.

    All ranks create the Saver together.
    """

    run_folder: RunFolder
    plan: Plan
    mesh: Mesh
    config: dict  # recorded in each checkpoint
    vocabulary: Vocabulary  # what the token ids mean
    log: Any  # monitor.log.Logger, whose room comes after this one
    # step of the last checkpoint that was written or restored, whose state need not be saved again
    step: int = 0
    mirror: Mirror | None = None  # copies to a URL what was written; None: nothing does
    timer: Callable[[str], AbstractContextManager] = nullcontext  # times a block, see Clock.part
    pending: Future | None = None  # the checkpoint that is being written
    # about the last checkpoint that was written:
    stall: float = 0.0  # seconds by which it delayed a step
    seconds: float = 0.0  # seconds that it took
    problem: str = ""  # why it failed
    # of all ranks, if each of them writes shards; None: rank 0 writes a ckpt.pt
    group: dist.ProcessGroup | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        # shards are written from a thread, which needs a separate group with a CPU backend
        if is_sharded(self.plan, self.mesh) and self.config["save_checkpoint"]:
            # now, and not at the first checkpoint, since the source code may be changed during a run
            import isogpt.checkpoint.sharded_files  # noqa: F401

            # long, since disks may be slow. It also limits how long the ranks take to connect, in the first
            # checkpoint
            self.group = dist.new_group(backend="gloo", timeout=timedelta(days=7))
        resumed = step_folder(self.run_folder.path, self.step)
        if self.mirror and is_main() and read_manifest(resumed):
            # the launch before may have been killed while it copied this one; newer steps no longer count
            self.mirror.request(resumed)

    @property
    def seconds_at_end(self) -> float:
        """Seconds that the next checkpoint may take, until it is written and copied."""
        return self.seconds + (self.mirror.seconds if self.mirror else 0.0)

    def is_due(self, state: TrainState, is_last: bool) -> bool:
        """
        Whether to save this state: always the last one and the best one so far, and others as
        always_save_checkpoint and save_interval say. Nothing is due while a step is launched whose outcome is
        not known.
        """
        c, progress = self.config, state.progress
        is_best = progress.best_step == progress.step
        was_evaluated = progress.val_loss is not None
        is_good = was_evaluated and (is_best or c["always_save_checkpoint"])
        is_time = c["save_interval"] > 0 and state.step % c["save_interval"] == 0
        return not (c["eval_only"] or progress.launched) and (is_last or is_good or is_time)

    def save(self, state: TrainState) -> None:
        """
        Start to write a checkpoint, in the background; first wait until the one before it is complete (all
        ranks). Does nothing with save_checkpoint=False, or if this step is on the disk. Exits with a message
        if weights are not finite, or if a different run has claimed the folder.
        """
        if not self.config["save_checkpoint"] or state.step == self.step:
            return
        with self.timer("save"):
            self.wait()
            began, run = time.perf_counter(), self.describe(state)
            with exit_together(self.log.failed):
                state.parts_of_extra()  # raises ValueError if it cannot be saved
            if self.group:
                copied = {name: part.copy() for name, part in state.parts().items()}
            else:
                of_state = (state.model, state.optimizers, state.extra)
                copied = nanogpt_state(run, *of_state, copy=True) if is_main() else {}
            do_together(self.prepare, state, on_error=self.log.failed)
            if self.group or is_main():
                background = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
                self.pending = background.submit(self.write, run, copied, state.progress.val_loss, began)
        self.stall = time.perf_counter() - began

    def prepare(self, state: TrainState) -> None:
        """
        Prepare to write a checkpoint of `state`, before any rank writes. Raises ValueError if weights are not
        finite, or if a different run has claimed the folder.
        """
        if bad := names_of_not_finite(state.model):  # also waits until a GPU has copied
            raise ValueError(f"weights are not finite at step {state.step}, and not saved: {shortened(bad)}")
        self.step, self.problem = state.step, ""
        remove(self.unfinished())  # what somebody has put there
        if is_main():
            check_owner(self.run_folder.path, self.run_folder.owner)

    def unfinished(self) -> Path:
        """The folder in which the checkpoint under way is written until it is complete."""
        return unfinished_folder(self.run_folder.path, self.run_folder.owner, self.step)

    def write(self, run: dict, copied: dict, val_loss: float | None, began: float) -> None:
        """Write a checkpoint in a separate folder; rank 0 then makes it count (in the background)."""
        folder = self.unfinished()
        manifest = make_manifest(run, self.plan.world_size, self.plan.zero, val_loss)
        try:
            if self.group:
                from isogpt.checkpoint import sharded_files

                manifest |= {"files": sharded_files.write(folder, copied, self.group), "run": run}
            else:
                manifest["files"] = write_file(folder / "ckpt.pt", copied)
            if is_main():
                held = self.mirror.held() if self.mirror else ()
                keep_last, owner = self.config["keep_last"], self.run_folder.owner
                committed = commit_checkpoint(folder, manifest, keep_last, owner, held)
                if self.mirror:
                    self.mirror.request(committed)
                self.seconds = time.perf_counter() - began
        except BaseException:
            remove(folder)  # makes room on a full disk
            raise

    def describe(self, state: TrainState) -> dict:
        """What a checkpoint contains besides tensors."""
        ours = {"dtype": self.plan.dtype, "vocabulary": self.vocabulary.describe()}
        ours |= {"scaler": state.scaler.state_dict(), **state.progress.describe()}
        return {
            "model_args": self.plan.model_args,
            "iter_num": state.step,
            "best_val_loss": state.progress.best_val_loss,
            "config": self.config,
            "isogpt": ours,
        }

    def save_and_fail(self, state: TrainState, reason: str) -> None:
        """Save the state when the run must end because data cannot be read, and record why (all ranks)."""
        self.save(state)
        self.wait()
        self.log.failed(reason)

    def poll(self) -> None:
        """Report the checkpoint under way if it has been completed or has failed, and what was copied."""
        if self.pending and self.pending.done():
            self.wait_alone()
        self.report_copies(self.log.print)

    def report_copies(self, say: Callable[[str], None]) -> None:
        """Report what was copied to the mirror since the last call; `say` prints it for the user."""
        while self.mirror and self.mirror.outcomes:
            event, text, facts = self.mirror.outcomes.popleft()
            say(text)
            self.log.event(event, **facts)

    def wait(self) -> None:
        """Wait until the checkpoint under way is written on every rank, and report it (all ranks)."""
        wait_together(self.pending)
        self.wait_alone()

    def end(self, state: TrainState, preempted_by: str, steps_taken: int) -> None:
        """
        End a run (all ranks). Exits with a message if its last checkpoint could not be written.

        Args:
            preempted_by: the signal or the setting that stopped the run before its end, which the folder
                records; "": none.
            steps_taken: by this process.
        """
        with exit_together(self.log.failed):
            if self.problem:
                raise ValueError(f"the final checkpoint could not be written to {self.config['out_dir']}")
            if preempted_by and is_main() and self.run_folder.owner:
                steps_kept = steps_taken if self.config["save_checkpoint"] else 0
                mark_preempted(self.run_folder, state.step, preempted_by, steps_kept)

    def wait_for_mirror(self, seconds_left: float) -> None:
        """
        Wait for a limited time until the last checkpoint is copied to the mirror (all ranks).

        Args:
            seconds_left: until the run must have ended.
        """
        if not self.mirror:
            return
        do_together(self.mirror.finish, seconds_left, has_done="has copied the last checkpoint to the mirror")
        self.report_copies(console.print_to_stderr)  # the last line of stdout may be the run's result

    def wait_alone(self) -> None:
        """Wait for what this rank writes of the checkpoint under way, if there is one, and report it."""
        if not self.pending:
            return
        pending, self.pending = self.pending, None
        folder = step_folder(self.run_folder.path, self.step)
        error = pending.exception()  # a full disk gives OSError, RuntimeError or DCP's own BaseException
        if error:
            self.problem = reason_of(error)[:300]
            text = f"warning: {folder.parent}: a checkpoint failed ({self.problem}); older ones are kept"
            self.log.event("save_failed", text, reason=self.problem)
        else:
            facts = {"folder": folder.name, "seconds": self.seconds, "stall": self.stall}
            self.log.event("save", f"saved {folder}", iter=self.step, **facts)
