"""
The logger: console, metrics.jsonl, wandb, TensorBoard, the user's alert command, and the plot of the loss
curve.
"""

import json
import math
import os
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from torch import Tensor

from isogpt.checkpoint.manifest import is_run
from isogpt.checkpoint.measures import NONE
from isogpt.checkpoint.owner import check_owner
from isogpt.checkpoint.progress import Progress
from isogpt.checkpoint.save import Saver
from isogpt.common import console
from isogpt.common.files import read_records, write_whole
from isogpt.data.dataset import Dataset
from isogpt.data.reader import Reader
from isogpt.launch import threads
from isogpt.launch.process_group import Ranks
from isogpt.monitor.alerts import alert
from isogpt.monitor.anomalies import LossSpikes, Overflows, SlowRanks
from isogpt.monitor.plot import plot_loss
from isogpt.monitor.records import as_json, duration, routing_record, step_line, step_record
from isogpt.monitor.signals import Stop
from isogpt.nn.architecture import GPTConfig
from isogpt.parallel.compilation import compile_report
from isogpt.parallel.plan import Plan
from isogpt.parallel.shares import spell_shares
from isogpt.speed.bytes_sent import BytesSent
from isogpt.speed.usage import utilization
from isogpt.training.schedule import Schedule
from isogpt.training.step_numbers import StepNumbers

FINAL_EVENTS = ("end", "preempted", "failed")  # the alert command gets time to finish


@dataclass
class Logger:
    """
    Everything that a run reports. On ranks other than 0, the methods only count the bytes sent and the steps.

    metrics.jsonl gets a line for each logged step, evaluation and event. wandb and TensorBoard get the steps
    and the evaluations, the alert command the events.
    """

    out_dir: str | Path
    ranks: Ranks
    progress: Progress
    alert_command: str = ""
    max_iters: int = 0
    eval_interval: int = 1
    flops_per_step: float = 0.0
    peak_flops: float | None = None
    peak_source: str = "unknown"
    file: IO[bytes] | None = None
    wandb: Any = None
    summary_writer: type | None = None  # TensorBoard's SummaryWriter, if it is used
    tensorboard: Any = None
    owner: str = ""  # owner of the run's folder, like Saver.owner: known before the file is opened
    is_full: bool = False  # whether a line of metrics.jsonl could not be written
    # when the run before a resume wrote its last line, in seconds since the epoch
    interrupted_at: float | None = None
    began: float = 0.0
    steps_taken: int = 0  # steps taken by this process, including steps that a rollback repeats
    spikes: LossSpikes = field(default_factory=LossSpikes)
    slow_ranks: SlowRanks = field(default_factory=SlowRanks)
    overflows: Overflows = field(default_factory=Overflows)
    traffic: BytesSent = field(default_factory=BytesSent)

    def print(self, text: str) -> None:
        """Print a line. A closed pipe, such as `| head`, costs lines, not the run."""
        if self.ranks.is_main and not console.print_line(text):
            print(
                "warning: stdout was closed; training continues, see metrics.jsonl",
                file=sys.stderr,
                flush=True,
            )

    def open(self) -> None:
        """
        Open metrics.jsonl and TensorBoard's event files (rank 0), and note when the resumed run was
        interrupted.
        """
        records = self.cut_back()
        with suppress(LookupError, TypeError, ValueError):  # there are no records, or not ours
            if self.progress.step:
                self.interrupted_at = datetime.fromisoformat(records[-1]["time"]).timestamp()

    def cut_back(self) -> list[dict]:
        """
        Cut the logs back to progress.step and open them (rank 0); returns the records that were in
        metrics.jsonl.

        Lines of this and later steps, which will be repeated, are removed, and so are torn lines. Events
        stay. The evaluation of this step's state stays if it will not be repeated, because it was made at the
        end of a run.
        """
        if not self.ranks.is_main:
            return []
        path = Path(self.out_dir, "metrics.jsonl")
        if self.file:
            self.file.close()
        records = read_records(path)
        step = self.progress.step
        kept = [r for r in records if "event" in r or r.get("iter", 0) < step]
        evaluation = []
        if step > self.max_iters or step % self.eval_interval:
            evaluation = [r for r in records if "val_loss" in r and r.get("iter") == step][-1:]
        kept += evaluation
        write_whole(path, "".join(json.dumps(r) + "\n" for r in kept))
        self.file = open(path, "ab", buffering=0)  # unbuffered: a line is written, or there is an error
        if self.summary_writer:
            if self.tensorboard:
                self.tensorboard.close()
            self.tensorboard = self.summary_writer(
                Path(self.out_dir, "tensorboard"), purge_step=self.progress.step
            )
            for r in evaluation:  # TensorBoard also purges this evaluation
                for name in ("train", "val"):
                    self.tensorboard.add_scalar(f"{name}/loss", r[f"{name}_loss"], step)
        return records

    def start_services(self, config: dict) -> None:
        """
        Start a wandb run, or continue the one in progress.wandb_id, and check that TensorBoard is installed
        (rank 0). This happens before anything on disk is changed.

        Raises:
            ValueError: wandb or TensorBoard is not installed or cannot start.
        """
        if config["tensorboard_log"]:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as e:
                raise ValueError(f"tensorboard_log: {e}; run: pip install tensorboard") from e
            self.summary_writer = SummaryWriter
        if not config["wandb_log"]:
            return
        project, name, run_id = config["wandb_project"], config["wandb_run_name"], self.progress.wandb_id
        try:
            import wandb

            resume = "allow" if run_id else None
            self.wandb = wandb.init(project=project, name=name, id=run_id, resume=resume, config=config)
        except Exception as e:  # Exception is the only common base class of wandb's errors
            reason = " ".join(str(e).split())
            raise ValueError(
                f"wandb cannot start ({reason}): set WANDB_MODE=offline or --wandb_log=False"
            ) from e
        self.progress.wandb_id = self.wandb.id

    def describe_speed(self, flops_per_token: float, peak_flops: float | None, peak_source: str) -> None:
        """Record what the MFU is computed from."""
        self.flops_per_step = flops_per_token * self.progress.tokens_per_step
        self.peak_flops, self.peak_source = peak_flops, peak_source

    def banner(  # noqa: PLR0913  (everything that a run is about to do)
        self,
        config: dict,
        data: Dataset,
        plan: Plan,
        parameter_count: int,
        origin: str,
        compile_note: str,
        reader: Reader,
        schedule: Schedule,
    ) -> None:
        """Print what the run is about to do."""
        r, tokens, share, mesh = self.ranks, self.progress.tokens_per_step, reader.share, reader.mesh
        length, vocab_size = plan.model_args["block_size"], plan.model_args["vocab_size"]
        sharding = f", zero {plan.zero}" if plan.zero else ""
        padding = f" ({share.padding()} rows are padding)" if share.padding() else ""
        rows = ", ".join(map(str, share.rows_of if len(set(share.rows_of)) > 1 else share.rows_of[:1]))
        peak = (
            f"{self.peak_flops / 1e12:.3g} TFLOP/s ({self.peak_source})"
            if self.peak_flops
            else "unknown, no mfu"
        )
        self.print(
            f"data:    {data.folder}, {len(data.train):,} training tokens, vocabulary size {vocab_size}"
        )
        unused = GPTConfig(**plan.model_args).unused_count
        active = f", {(parameter_count - unused) / 1e6:.2f}M for each token" if unused else ""
        self.print(f"model:   {parameter_count / 1e6:.2f}M parameters{active}, from {origin}")
        self.print(
            f"ranks:   {r.topology()} on {r.device.type}, {r.network}, {plan.dtype}{sharding}; {compile_note}"
        )
        if mesh.splits_model or mesh.cp > 1:
            named = {"pp": mesh.pp, "dp": mesh.data_size, "cp": mesh.cp, "tp": mesh.tp}
            degrees = " x ".join(f"{name} {n}" for name, n in named.items() if n > 1)
            experts = f", in dp: ep {mesh.ep}" if mesh.ep > 1 else ""
            self.print(f"mesh:    {r.world_size} processes = {degrees}{experts}")
        if mesh.islands > 1:
            self.print(
                f"islands: {mesh.islands} of {r.world_size // mesh.islands} processes each, which average "
                "their "
                f"weights every {config['local_steps']} steps"
            )
        if config["islands"] == 0 and mesh.islands == 1:
            self.print("islands: none, since all processes are on one machine")
        if (kind := config["grad_compression"]) != "none":
            use = f"sent as {kind}" if mesh.replicas(plan.zero) > 1 else "not sent, there is only one replica"
            self.print(f"network: gradients are {use}")
        self.print(
            f"step:    {share.sequences} sequences x {length} = {tokens:,} tokens, on each rank "
            f"{share.micro_steps} micro-steps x {rows} rows{padding}"
        )
        if config["shares"] == "auto":
            self.print(
                f"shares:  in proportion to measured speeds, as --shares={spell_shares(reader.speeds)}"
            )
        if config["lr_scaling"] != "none":
            warmup = f"warm-up of {schedule.warmup_iters} steps" if config["decay_lr"] else "no warm-up"
            self.print(
                f"rate:    {schedule.learning_rate:.4g} = learning_rate {config['learning_rate']:.4g} x "
                f"{schedule.factor:.4g} ({config['lr_scaling']} in {share.sequences} sequences per step, "
                f"base_batch {config['base_batch']}), {warmup}"
            )
        self.print(f"peak:    {peak}")
        if plan.micro_batch < plan.batch_size:
            self.print(
                f"memory:  micro-batches of {plan.micro_batch} instead of {plan.batch_size}, "
                "since a previous attempt ran out of memory"
            )
        if threads.NOTE:
            self.print(f"threads: {threads.NOTE}")

    def notes(self, notes: list[str]) -> None:
        """Print what a user should know about the settings, a line for each note."""
        for note in notes:
            self.print(f"note:    {note}")

    def start(self, eval_only: bool) -> None:
        """Start to estimate the remaining time and to count bytes sent, just before the first step."""
        self.began, step = time.perf_counter(), self.progress.step
        if step > self.max_iters and not eval_only:
            hint = f"to continue, set --max_iters={2 * step} or so"
            self.print(f"{self.out_dir} is at step {step}, which is beyond max_iters: {hint}")
        self.traffic.start(self.ranks.world_size)

    def event(self, name: str, **facts: object) -> None:
        """Record an event in metrics.jsonl and pass it to the alert command."""
        if self.ranks.is_main:
            record = {"event": name, "iter": self.progress.step, **facts}
            self.write(record)
            wait_s = 10 if name in FINAL_EVENTS else 0
            alert(self.alert_command, as_json(record | {"out_dir": str(self.out_dir)}), wait_s)

    def failed(self, reason: str) -> None:
        """Record why the run ends."""
        self.event("failed", reason=reason)

    def write(self, record: dict) -> None:
        """Append a line to metrics.jsonl. A full disk costs lines, not the run."""
        if not self.file:
            return
        record = as_json(record | {"time": datetime.now(UTC).isoformat(timespec="milliseconds")})
        try:
            if os.fstat(self.file.fileno()).st_nlink == 0 and not self.reopen():
                return
            self.file.write(f"{json.dumps(record)}\n".encode())
        except OSError as e:
            if not self.is_full:
                self.print(f"warning: {self.file.name} cannot be written ({e.strerror}); training continues")
            self.is_full = True

    def reopen(self) -> bool:
        """
        Open metrics.jsonl again after the file was deleted or replaced (rank 0). Returns whether the file is
        still this run's: a run that resumes in the same folder replaces the file, and two runs must not write
        to one file.
        """
        name = self.file.name
        self.file.close()
        self.file = None
        try:
            check_owner(Path(self.out_dir), self.owner)
        except ValueError:
            self.print(
                f"warning: another run was started in {self.out_dir}: this one no longer writes to {name}"
            )
            return False
        self.print(f"warning: {name} was deleted: it is written anew from here on")
        self.file = open(name, "ab", buffering=0)
        return True

    def folder_lost(self, reason: str) -> None:
        """Report that the run's folder was lost, see Saver.check; '': it was not lost."""
        if reason:
            self.print(f"warning: {reason}")
            self.event("folder_lost", reason=reason)

    def send(self, values: dict) -> None:
        """Send numbers to wandb and TensorBoard. wandb keeps the first of two values for a step."""
        if self.wandb:
            self.wandb.log({"iter": self.progress.step, **values}, step=self.progress.step)
        if self.tensorboard:
            for name, value in values.items():
                if isinstance(value, int | float):
                    self.tensorboard.add_scalar(name, value, self.progress.step)

    def evaluation(self, train_loss: float, val_loss: float, lr: float) -> None:
        """Report an evaluation, and plot the losses so far."""
        self.print(f"step {self.progress.step}: train loss {train_loss:.4f}, val loss {val_loss:.4f}")
        self.write({"iter": self.progress.step, "train_loss": train_loss, "val_loss": val_loss})
        self.send({"train/loss": train_loss, "val/loss": val_loss, "lr": lr})
        if self.steps_taken and self.progress.step <= self.max_iters:  # `done` plots after the last step
            self.plot()

    def step(self, numbers: StepNumbers, lr: float, log_interval: int, routing: Tensor | None) -> None:
        """
        Report a step, and a loss spike or a slow rank if there is one. For `routing` see
        parallelize.take_routing.
        """
        self.steps_taken += 1
        if not self.ranks.is_main:
            return
        if self.interrupted_at:
            self.event("recovered", seconds=max(0.0, time.time() - self.interrupted_at))  # clocks may differ
            self.interrupted_at = None
        if self.steps_taken == 1 and (report := compile_report()):
            self.print(report)
        if self.overflows.seen(bool(numbers.is_finite)):
            scale = numbers.loss_scale.max().item()
            self.print(
                f"warning: {self.overflows.count} steps in succession were skipped: their gradients "
                "overflow in "
                f"float16, although the loss scale is down to {scale:g}. If this goes on, set --dtype=float32"
            )
            self.event("overflows", loss_scale=scale)
        if self.progress.step % log_interval:
            return
        record = step_record(self.progress, numbers, lr, self.flops_per_step, self.peak_flops)
        record["gpu_percent"] = utilization(self.ranks.device)
        if routing is not None:
            record |= routing_record(routing, self.progress.tokens_per_step)
        left_s = (time.perf_counter() - self.began) / self.steps_taken * (self.max_iters - self.progress.step)
        self.print(step_line(record, left_s))
        self.write(record)
        mfu = None if record["mfu"] is None else record["mfu"] * 100  # in percent, as nanoGPT sends it
        self.send(record | {"mfu": mfu})
        if self.spikes.seen(record["loss"]):
            self.event("spike", loss=record["loss"])
        columns = {
            "forward ms": numbers.forward_ms,
            "data wait ms": numbers.data_ms,
            "memory GB": numbers.memory_gb,
        }
        for slow in self.slow_ranks.seen({name: values.tolist() for name, values in columns.items()}):
            self.print(f"warning: a slow rank: {slow}")
            self.event("slow_rank", what=slow)

    def saved(self, saver: Saver | None) -> None:
        """Report the checkpoint that a Saver has just completed, or its failure; None: nothing happened."""
        if saver and saver.problem:
            self.print(
                f"warning: {self.out_dir}: a checkpoint failed ({saver.problem}); older checkpoints are kept"
            )
            self.event("save_failed", reason=saver.problem)
        elif saver:
            self.print(f"saved {saver.folder}")
            self.write(
                {
                    "event": "save",
                    "iter": saver.step,
                    "folder": saver.folder.name,
                    "seconds": saver.seconds,
                    "stall": saver.stall,
                }
            )

    def plot(self) -> str:
        """Plot the loss curve; returns a sentence about the plot. Errors while drawing do not stop a run."""
        try:
            return f"the loss curve: {plot_loss(Path(self.out_dir))}" if self.ranks.is_main else ""
        except ImportError:
            return "no plot of the loss curve: pip install matplotlib"
        except Exception as e:  # matplotlib raises many types
            return f"no plot of the loss curve: {' '.join(str(e).split())}"

    def done(self) -> None:
        """Report the end of training, and plot the loss curve."""
        p, took, plot = self.progress, duration(time.perf_counter() - self.began), self.plot()
        best = ""
        if math.isfinite(p.best_val_loss):
            at_step = f" at step {p.best_step}" if p.best_step != NONE else ", which no checkpoint contains"
            best = f", best val loss {p.best_val_loss:.4f}{at_step}"
        self.print(f"done: {self.steps_taken} steps in {took}{best}")
        self.print(plot)

    def end(self, stop: Stop | None, spans_ms: dict) -> None:
        """Record the end of the run, or the reason why the run stopped early, and close the files."""
        if stop:
            has_checkpoint = is_run(str(self.out_dir))
            hint = (
                "resume with --init_from=resume or auto"
                if has_checkpoint
                else "there is no checkpoint to resume"
            )
            self.print(f"stopped on request before step {self.progress.step}: {hint}")
            self.event("preempted", spans_ms=spans_ms, signal=stop.agreed)
        else:
            self.event("end", spans_ms=spans_ms)
        if self.tensorboard:
            self.tensorboard.close()
        if self.wandb:
            self.wandb.finish()
