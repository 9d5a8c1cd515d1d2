"""The banner: what a run is about to do."""

from dataclasses import dataclass

from isogpt.data.dataset import Dataset
from isogpt.data.reader import Reader
from isogpt.launch import torch_import
from isogpt.launch.network import own_cores
from isogpt.launch.process_group import Ranks
from isogpt.nn.architecture import GPTConfig
from isogpt.parallel.plan import Plan
from isogpt.parallel.shares import spell_shares
from isogpt.training.schedule import Schedule


@dataclass(frozen=True)
class Banner:
    """The lines that a run prints before the first step; `str()` joins them."""

    config: dict
    ranks: Ranks
    data: Dataset
    plan: Plan
    parameter_count: int
    origin: str  # where the weights are from
    compile_note: str
    reader: Reader
    schedule: Schedule
    peak_flops: float | None
    peak_source: str
    notes: list[str]  # what a user should know about the settings, a line for each note

    def __str__(self) -> str:
        return "\n".join(
            [
                *self.model_lines(),
                *self.rank_lines(),
                *self.step_lines(),
                *self.machine_lines(),
                *(f"note:    {note}" for note in self.notes),
            ]
        )

    def model_lines(self) -> list[str]:
        """The data and the model."""
        unused = GPTConfig(**self.plan.model_args).unused_count
        active = f", {(self.parameter_count - unused) / 1e6:.2f}M for each token" if unused else ""
        return [
            f"data:    {self.data.folder}, {len(self.data.train):,} training tokens, "
            f"vocabulary size {self.plan.model_args['vocab_size']}",
            f"model:   {self.parameter_count / 1e6:.2f}M parameters{active}, from {self.origin}",
        ]

    def rank_lines(self) -> list[str]:
        """The processes, and how they divide the work."""
        r, mesh, config = self.ranks, self.reader.mesh, self.config
        sharding = f", zero {self.plan.zero}" if self.plan.zero else ""
        lines = [
            f"ranks:   {r.topology()} on {r.device.type}, {r.network}, {self.plan.dtype}{sharding}; "
            f"{self.compile_note}"
        ]
        if mesh.splits_model or mesh.cp > 1:
            named = {"pp": mesh.pp, "dp": mesh.data_size, "cp": mesh.cp, "tp": mesh.tp}
            degrees = " x ".join(f"{name} {n}" for name, n in named.items() if n > 1)
            experts = f", in dp: ep {mesh.ep}" if mesh.ep > 1 else ""
            lines.append(f"mesh:    {r.world_size} processes = {degrees}{experts}")
        if mesh.islands > 1:
            lines.append(
                f"islands: {mesh.islands} of {r.world_size // mesh.islands} processes each, which average "
                f"their weights every {config['local_steps']} steps"
            )
        if config["islands"] == 0 and mesh.islands == 1:
            lines.append("islands: none, since all processes are on one machine")
        if (kind := config["grad_compression"]) != "none":
            use = "not sent, there is only one replica"
            if mesh.replicas.size > 1:
                use = f"sent as {kind}"
            lines.append(f"network: gradients are {use}")
        return lines

    def step_lines(self) -> list[str]:
        """The sequences of a step, and the learning rate."""
        share, config, schedule = self.reader.share, self.config, self.schedule
        length, tokens = self.reader.block_size, share.sequences * self.reader.block_size
        rows = ", ".join(map(str, share.rows_of if len(set(share.rows_of)) > 1 else share.rows_of[:1]))
        padding = f" ({share.padding()} rows are padding)" if share.padding() else ""
        unit = "micro-step" if share.micro_steps == 1 else "micro-steps"
        lines = [
            f"step:    {share.sequences} sequences x {length} = {tokens:,} tokens, on each "
            f"rank {share.micro_steps} {unit} x {rows} rows{padding}"
        ]
        if config["shares"] == "auto":
            lines.append(
                f"shares:  in proportion to measured speeds, as --shares={spell_shares(self.reader.speeds)}"
            )
        if config["lr_scaling"] != "none":
            warmup = f"warm-up of {schedule.warmup_iters} steps" if config["decay_lr"] else "no warm-up"
            lines.append(
                f"rate:    {schedule.learning_rate:.4g} = learning_rate {config['learning_rate']:.4g} x "
                f"{schedule.factor:.4g} ({config['lr_scaling']} in {share.sequences} sequences per step, "
                f"base_batch {config['base_batch']}), {warmup}"
            )
        return lines

    def machine_lines(self) -> list[str]:
        """The peak of the devices, the micro-batches, the cores and the threads."""
        peak, micro_batch, batch_size = "unknown, no mfu", self.plan.micro_batch, self.plan.batch_size
        if self.peak_flops:
            peak = f"{self.peak_flops / 1e12:.3g} TFLOP/s ({self.peak_source})"
        lines = [f"peak:    {peak}"]
        if micro_batch < batch_size:
            lines.append(
                f"memory:  micro-batches of {micro_batch} instead of {batch_size}, "
                "since a previous attempt ran out of memory"
            )
        processes, cores = self.ranks.core_sharers, len(own_cores())
        if self.ranks.device.type == "cpu" and processes > cores:
            lines.append(
                f"cores:   {processes} processes share {cores} CPU cores: this tests a layout, and is slower "
                f"than --nproc={cores}"
            )
        if torch_import.NOTE:
            lines.append(f"threads: {torch_import.NOTE}")
        return lines
