"""Save a run on any layout, in the background."""

import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn

from isogpt.checkpoint.commit import commit_checkpoint
from isogpt.checkpoint.folder import RunFolder
from isogpt.checkpoint.forks import MODEL_ARGS, shortened
from isogpt.checkpoint.manifest import make_manifest, step_folder
from isogpt.checkpoint.owner import check_owner, claim_again, is_owned, try_to_write, unfinished_folder
from isogpt.checkpoint.progress import Progress
from isogpt.checkpoint.restore import state_parts
from isogpt.checkpoint.source import names_of_not_finite
from isogpt.common.files import reason_of
from isogpt.data.vocabulary import Vocabulary
from isogpt.launch.device import synchronize
from isogpt.launch.process_group import rank_names
from isogpt.launch.together import exit_together, gather_objects, is_main, restarts_left, wait_together
from isogpt.parallel.local_parts import copy_to_cpu
from isogpt.parallel.mesh import Mesh
from isogpt.parallel.plan import Plan
from isogpt.parallel.slow_network import SlowNetwork, keeps_errors
from isogpt.training import optimizer_state


@dataclass
class Saver:
    """
    Write one checkpoint at a time, in the background. Older checkpoints are deleted only when a new
    checkpoint is complete.

    All ranks create the Saver together.
    """

    run_folder: RunFolder
    keep_last: int
    plan: Plan
    mesh: Mesh
    slow_network: SlowNetwork
    config: dict  # recorded in each checkpoint
    vocabulary: Vocabulary | None = None  # what the token ids mean
    pending: Future | None = None
    # step of the last checkpoint that was written or restored, whose state need not be saved again
    step: int = 0
    began: float = 0.0  # when the last copy was started
    # about the last checkpoint that was written:
    folder: Path | None = None
    stall: float = 0.0  # seconds by which it delayed a step
    seconds: float = 0.0  # seconds that it took
    problem: str = ""  # why it failed
    group: dist.ProcessGroup | None = None

    def __post_init__(self) -> None:
        # whether ranks hold different parts of the state
        has_errors = keeps_errors(self.plan.grad_compression) and self.plan.world_size > 1
        self.is_sharded = self.plan.zero > 0 or self.mesh.splits_model or self.mesh.islands > 1 or has_errors
        # shards are written from a thread, which needs a separate group with a CPU backend
        if self.is_sharded:
            group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self.mesh.timeout_s))
            # long, since disks may be slow; set now that the group is connected
            self.group = self.mesh.limit(group, timeout_s=7 * 24 * 3600)

    def check_folder(self, hosts: tuple[str, ...]) -> None:
        """
        Check that every rank's out_dir is the folder that this run has claimed, and that every rank that
        writes checkpoints can write there (all ranks). Exits with a message if a checkpoint would be
        incomplete.

        If rank 0 writes everything, rank 0 may use a folder that other ranks do not see until a checkpoint is
        read.
        """
        if not self.run_folder.owner or not self.config["save_checkpoint"]:
            return
        out = self.run_folder.path.absolute()
        is_seen = is_owned(out, self.run_folder.owner, patience_s=min(5.0, self.mesh.timeout_s / 2))
        seen, names = gather_objects((is_seen, str(out))), rank_names(hosts)
        blind = [f"{names[r]} looks in {folder}" for r, (is_seen, folder) in enumerate(seen) if not is_seen]
        others = "; ".join(blind[:4]) + (f"; and {len(blind) - 4} more" if len(blind) > 4 else "")
        where = (
            f"{names[0]} keeps this run in {seen[0][1]}, which is not the out_dir of other ranks: {others}"
        )
        advice = "set --out_dir= to one folder on a file system that all machines share"
        with exit_together():
            if blind and restarts_left():
                raise ValueError(
                    f"{where}. torchrun restarts this run after a failure, and then all ranks read the "
                    f"checkpoints, and any rank may be rank 0: {advice}, or type --max-restarts=0"
                )
            if blind and self.is_sharded:
                raise ValueError(
                    f"{where}. All ranks write checkpoints, in shards, into one folder: {advice}, or "
                    "--save_checkpoint=False"
                )
        if blind and is_main():
            print(
                f"warning: {where}. Rank 0 writes the checkpoints, but all ranks read them on a resume or "
                "rollback: "
                f"{advice}, or copy them before a resume",
                flush=True,
            )
        if not self.is_sharded:
            return
        problems = gather_objects(try_to_write(out, self.run_folder.owner, self.mesh.rank))
        if is_main():
            shutil.rmtree(unfinished_folder(out, self.run_folder.owner, 0), ignore_errors=True)
        with exit_together():
            if problems[self.mesh.rank]:
                raise ValueError(problems[self.mesh.rank])

    def copy(self, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> dict:
        """
        Start to copy this rank's part of the state to the CPU; without shards, only rank 0 copies. The copy,
        which `start` writes, is complete after `check`, which waits for a GPU.
        """
        self.began = time.perf_counter()
        if not self.is_sharded:
            return copied_state(model, optimizers) if is_main() else {}
        from isogpt.checkpoint import sharded_files

        state, own = (
            state_parts(model, optimizers, self.mesh.rank_and_size("islands")),
            self.slow_network.saved_parts(),
        )
        state = {name: state.get(name, {}) | own.get(name, {}) for name in state | own}
        return sharded_files.copies(self.slow_network.saved_weights(), state)

    def check(self, model: nn.Module, step: int) -> str:
        """
        Wait for the device, and raise ValueError if weights are not finite or a different run owns the
        folder, since then no checkpoint must be written. Returns a sentence if the folder was lost, else ''.
        """
        if bad := names_of_not_finite(model):
            raise ValueError(
                f"weights are not finite at step {step} ({shortened(bad)}): no checkpoint was written"
            )
        if not is_main():
            return ""
        check_owner(self.run_folder.path, self.run_folder.owner)
        return claim_again(self.run_folder.path, self.run_folder.owner, self.run_folder.launch)

    def start(
        self, copied: dict, progress: Progress, scaler: torch.amp.GradScaler, val_loss: float | None
    ) -> None:
        """Start to write the state that `copy` returned (all ranks; without shards, only rank 0 writes)."""
        # where the folder is not shared, rank 0 could not discard this rank's shards of a failed checkpoint
        shutil.rmtree(
            unfinished_folder(self.run_folder.path, self.run_folder.owner, self.step), ignore_errors=True
        )
        self.step, self.problem = progress.step, ""
        extra = {"dtype": self.plan.dtype, "scaler": scaler.state_dict(), **progress.describe()}
        extra["vocabulary"] = self.vocabulary.describe() if self.vocabulary else None
        run = {
            "model_args": self.plan.model_args,
            "iter_num": progress.step,
            "best_val_loss": progress.best_val_loss,
        }
        run |= {"config": self.config, "isogpt": extra}
        self.folder = step_folder(self.run_folder.path, self.step)
        unfinished = unfinished_folder(self.run_folder.path, self.run_folder.owner, self.step)
        manifest = make_manifest(run, self.plan.world_size, self.plan.zero, val_loss)
        if self.is_sharded:
            from isogpt.checkpoint import sharded_files

            extra |= self.slow_network.describe()
            manifest["run"] = run
            self.pending = sharded_files.start_write(unfinished, copied, self.group)
            write = self.pending.result  # waits for all ranks' shards
        elif is_main():
            write = partial(write_file, unfinished / "ckpt.pt", in_nanogpts_form(run, copied))
        if is_main():
            background = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
            self.pending = background.submit(self.finish, write, unfinished, manifest, self.began)
        self.stall = time.perf_counter() - self.began

    def finish(self, write: Callable[[], object], unfinished: Path, manifest: dict, began: float) -> None:
        """Write the files and commit the checkpoint (rank 0, in the background)."""
        try:
            write()
            if self.is_sharded:
                from isogpt.checkpoint import sharded_files

                sharded_files.check_complete(unfinished)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)  # makes room on a full disk
            raise
        commit_checkpoint(unfinished, manifest, self.keep_last, self.run_folder.owner)
        self.seconds = time.perf_counter() - began

    def poll(self) -> "Saver | None":
        """`wait` if the checkpoint under way has been completed or has failed, else None."""
        return self.wait() if self.pending and self.pending.done() else None

    def wait_together(self) -> "Saver | None":
        """`wait`, on all ranks until the slowest rank's part is written."""
        wait_together(self.pending)
        return self.wait()

    def wait(self) -> "Saver | None":
        """
        Wait for the checkpoint under way; ranks other than 0 wait for what they write. Returns None if there
        is no checkpoint under way, else this Saver with the outcome: folder and seconds (rank 0), or problem.
        """
        if not self.pending:
            return None
        pending, self.pending = self.pending, None
        error = pending.exception()  # a full disk gives OSError, RuntimeError or DCP's own BaseException
        if error:
            self.problem = reason_of(error)[:300]
        return self

    def writes_alone(self) -> bool:
        """Whether this rank writes the checkpoint under way without the other ranks' help."""
        return self.pending is not None and not self.is_sharded


def nanogpt_state(run: dict, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> dict:
    """
    Copy the state to the CPU in nanoGPT's form, which nanoGPT's train.py and sample.py load if the model is a
    GPT-2.
    """
    copied = copied_state(model, optimizers)
    synchronize(next(model.parameters()).device)
    return in_nanogpts_form(run, copied)


def copied_state(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> dict:
    """
    Copy the weights and the optimizer's state to the CPU: complete when the caller has waited for the device.
    """
    weights = {name: copy_to_cpu(p.detach()) for name, p in model.named_parameters()}
    state = optimizer_state.saved_state(model, optimizers)
    state["state"] = {i: {k: copy_to_cpu(v) for k, v in old.items()} for i, old in state["state"].items()}
    if model.config.tied:
        weights["lm_head.weight"] = weights["transformer.wte.weight"]
    return {"model": weights, "optimizer": state}


def in_nanogpts_form(run: dict, copied: dict) -> dict:
    """What nanoGPT stores, from a run's description and `copied_state`."""
    args, others = {}, {}
    for name, value in run["model_args"].items():  # other fields are unknown to nanoGPT
        (args if name in (*MODEL_ARGS, "dropout") else others)[name] = value
    extra = run["isogpt"] | {"model_args": others}
    return {**copied, **run, "model_args": args, "isogpt": extra}


def write_file(path: Path, state: dict) -> None:
    """Write a ckpt.pt to the disk, in a new folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as f:
        try:
            torch.save(state, f)
        except RuntimeError as e:  # torch.save hides an OSError, such as a full disk
            raise OSError(reason_of(e)) from e
        f.flush()
        os.fsync(f.fileno())
