"""
What replicas send over a slow network, compressed gradients or weights, as one object for train.py.
"""

from dataclasses import dataclass

import torch
from torch import nn

from isogpt.parallel.compression import Compression
from isogpt.parallel.local_parts import LocalPart, local_parts_by_name
from isogpt.parallel.local_sgd import Islands
from isogpt.parallel.mesh import Mesh
from isogpt.parallel.plan import Plan


@dataclass
class SlowNetwork:
    """Gradient compression and islands; the methods do nothing where neither is used."""

    model: nn.Module
    compression: Compression | None
    islands: Islands | None

    @property
    def island(self) -> tuple[int, int]:
        """(the number of this rank's island, how many islands there are)."""
        return (self.islands.mesh.index("islands"), self.islands.mesh.islands) if self.islands else (0, 1)

    def after_step(self, step: int) -> None:
        """Average the islands' weights, if that is due after this step (all ranks)."""
        if self.islands:
            self.islands.after_step(step)

    def forget(self) -> None:
        """Drop what a step that was not taken has left behind (all ranks)."""
        if self.compression:
            self.compression.forget()

    def saved_weights(self) -> dict[str, LocalPart]:
        """The weights that a checkpoint stores as the model's."""
        return self.islands.saved_weights() if self.islands else local_parts_by_name(self.model)

    def saved_parts(self) -> dict[str, dict[str, LocalPart]]:
        """What a checkpoint stores besides the model's weights and the optimizer's state."""
        parts = self.compression.saved_parts(self.model) if self.compression else {}
        for name, others in (self.islands.saved_parts() if self.islands else {}).items():
            parts[name] = parts.get(name, {}) | others
        return parts

    def restart(self, step: int, saved: dict[str, torch.Size] | None = None) -> None:
        """
        Start from the model's weights at a step, without errors or an outer momentum. Tensors are allocated
        for what a checkpoint saved, by names (see state.flat) and shapes.
        """
        if self.compression:
            self.compression.restart(step, saved or {})
        if self.islands:
            self.islands.restart()


def keeps_errors(grad_compression: str) -> bool:
    """Whether a compression keeps its errors, which are added to the next gradients."""
    return grad_compression not in ("none", "fp16", "bf16")


def make_slow_network(model: nn.Module, mesh: Mesh, plan: Plan) -> SlowNetwork:
    """
    Make the SlowNetwork for the settings grad_compression, islands, local_steps and outer_* (all ranks).
    `restart` is called when the model contains the weights to start from.
    """
    compression = islands = None
    if plan.replica_compression != "none" and mesh.replicas.size > 1:
        kind, _, amount = plan.replica_compression.partition(":")
        compression = Compression(kind, float(amount or 0), mesh, next(model.parameters()).device)
    if mesh.islands > 1:
        islands = Islands(model, mesh, plan)
    return SlowNetwork(model, compression, islands)
