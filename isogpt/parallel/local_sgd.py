"""
Local SGD: groups of ranks (islands) take steps separately and average their weights periodically, for
networks that are too slow to send gradients at every step. With an outer optimizer this is DiLoCo (Douillard
et al. 2023, arXiv:2311.08105).
"""

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from isogpt.parallel.compression import mean_over
from isogpt.parallel.data_parallel import in_buckets, reshard, views_of
from isogpt.parallel.local_parts import LocalPart, local, local_part_of, splits_of
from isogpt.parallel.mesh import Mesh
from isogpt.parallel.plan import Plan


@dataclass
class Islands:
    """
    The islands' state on this rank, and the outer optimizer.

    After every `local_steps` steps, the mean change of the islands' weights is the gradient of an outer step,
    from which all islands continue. The outer step is SGD with Nesterov momentum (Sutskever et al. 2013).
    Each island keeps the moments of its inner optimizer. Learning rate 1 without momentum is Local SGD (Stich
    2018, arXiv:1805.09767).
    """

    model: nn.Module
    mesh: Mesh
    plan: Plan
    params: dict[str, nn.Parameter] = field(init=False)
    weights: dict[str, Tensor] = field(init=False)  # weights after the last outer step, equal on all islands
    momentum: dict[str, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.params = dict(self.model.named_parameters())
        self.group = self.mesh.group("islands")

    def restart(self) -> None:
        """Start from the model's weights, without momentum."""
        self.weights = {name: p.detach().clone() for name, p in self.params.items()}
        self.momentum = {name: torch.zeros_like(weight) for name, weight in self.weights.items()}

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        """Take an outer step after an inner step, if it is due (all ranks)."""
        if (step + 1) % self.plan.local_steps:
            return
        reshard(self.model)
        for (name, p), change in zip(self.params.items(), self.mean_changes(step), strict=True):
            weight, momentum = local(self.weights[name]), local(self.momentum[name])
            momentum.mul_(self.plan.outer_momentum).add_(change)
            weight.sub_(change.add_(momentum, alpha=self.plan.outer_momentum), alpha=self.plan.outer_lr)
            local(p).copy_(weight)

    def mean_changes(self, step: int) -> list[Tensor]:
        """The mean over the islands of each parameter's change since the last outer step (all ranks)."""
        changes = [local(self.weights[name]) - local(p) for name, p in self.params.items()]
        generator = torch.Generator(changes[0].device)
        generator.manual_seed(step * dist.get_world_size() + self.mesh.rank)
        for bucket in in_buckets(changes):
            flat = torch.cat([change.flatten() for change in bucket])
            mean = mean_over(flat, self.plan.grad_compression, self.group, generator)
            torch._foreach_copy_(bucket, views_of(mean, bucket))
        return changes

    @torch.no_grad()
    def put_outer_weights(self) -> None:
        """Copy the weights of the last outer step into the model, for an evaluation."""
        for name, p in self.params.items():
            local(p).copy_(local(self.weights[name]))

    def saved_weights(self) -> dict[str, LocalPart]:
        """The weights of the last outer step."""
        return {
            name: local_part_of(weight, splits_of(self.params[name])) for name, weight in self.weights.items()
        }

    def saved_parts(self) -> dict[str, dict[str, LocalPart]]:
        """The outer momentum, and each island's current weights."""
        island = (self.mesh.index("islands"), self.mesh.islands)
        parts = {}
        for name, p in self.params.items():
            splits = splits_of(p)
            parts[name] = {
                "outer_momentum": local_part_of(self.momentum[name], splits),
                "inner": local_part_of(p.detach(), splits).in_row(*island),
            }
        return parts
