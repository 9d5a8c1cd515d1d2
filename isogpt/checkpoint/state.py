"""The state of a run: all that changes from step to step, and that a checkpoint stores."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from isogpt.checkpoint.ckpt_file import copied_state
from isogpt.checkpoint.progress import Progress
from isogpt.checkpoint.restore import read_slow_network, restore_checkpoint, state_parts
from isogpt.checkpoint.source import OpenCheckpoint
from isogpt.parallel.local_parts import LocalPart
from isogpt.parallel.slow_network import SlowNetwork


@dataclass
class TrainState:
    """
    The state of a run before step `progress.step`. `slow_network` is what gradient compression and islands
    keep from step to step.
    """

    model: nn.Module  # without the wrapper DistributedDataParallel
    optimizers: list[torch.optim.Optimizer]
    scaler: torch.amp.GradScaler
    progress: Progress
    slow_network: SlowNetwork

    @property
    def step(self) -> int:
        """The next step."""
        return self.progress.step

    def load(self, checkpoint: OpenCheckpoint) -> None:
        """
        Continue with a checkpoint's state, on any layout; the best loss and the skipped steps stay. Each rank
        reads what it holds, and ranks do not communicate.

        Raises:
            ValueError: the checkpoint does not fit, or a file cannot be read or would run code.
        """
        restore_checkpoint(checkpoint, self.model, self.optimizers, island=self.slow_network.island)
        self.progress.rewind(checkpoint.run)
        if checkpoint.run["isogpt"].get("scaler"):
            self.scaler.load_state_dict(checkpoint.run["isogpt"]["scaler"])
        read_slow_network(checkpoint, self.slow_network, self.step)

    def copy(self) -> dict[str, Tensor | dict]:
        """
        Start to copy the state to the CPU in nanoGPT's form, from a rank that holds all of it. The copy is
        complete when the caller has waited for the device.
        """
        return copied_state(self.model, self.optimizers)

    def copy_parts(self) -> dict[str, LocalPart]:
        """Like `copy`, of what this rank holds, by the names that checkpoints in shards use."""
        from isogpt.checkpoint import sharded_files

        parts = state_parts(self.model, self.optimizers, self.slow_network.island)
        for name, others in self.slow_network.saved_parts().items():
            parts[name] = parts.get(name, {}) | others
        return sharded_files.copies(self.slow_network.saved_weights(), parts)

    def describe(self) -> dict:
        """What a checkpoint stores of the state besides tensors, iter_num and best_val_loss."""
        scaler = {"scaler": self.scaler.state_dict()}
        return scaler | self.progress.describe() | self.slow_network.describe()

    def advance(self) -> None:
        """Count a step that was taken."""
        self.progress.advance()

    def skip(self) -> None:
        """Leave out a step."""
        self.progress.skip()
