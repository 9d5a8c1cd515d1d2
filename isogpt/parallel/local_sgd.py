"""
Local SGD: groups of ranks (islands) take steps separately and average their weights periodically, for
networks that are too slow to send gradients at every step. With an outer optimizer this is DiLoCo (Douillard
et al. 2023, arXiv:2311.08105).
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from isogpt.parallel.compression import average_flat
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

    def __post_init__(self) -> None:
        self.params = list(self.model.parameters())
        self.place = self.mesh.index("islands"), self.mesh.islands

    def restart(self) -> None:
        """Start from the model's weights, without momentum."""
        # after the last outer step, equal on all islands
        self.weights = [p.detach().clone() for p in self.params]
        self.momentum = [torch.zeros_like(weight) for weight in self.weights]

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        """Take an outer step after an inner step, if it is due (all ranks)."""
        if (step + 1) % self.plan.local_steps:
            return
        reshard(self.model)
        lr, beta = self.plan.outer_lr, self.plan.outer_momentum
        changes = self.mean_changes(step)
        for weight, momentum, change in zip(self.weights, self.momentum, changes, strict=True):
            local(momentum).mul_(beta).add_(change)
            change.add_(local(momentum), alpha=beta)
            local(weight).sub_(change, alpha=lr)
        self.put_outer_weights()

    def mean_changes(self, step: int) -> list[Tensor]:
        """
        The mean over the islands of each parameter's change since the last outer step, as grad_compression
        sends it (all ranks).
        """
        changes = [local(w) - local(p) for w, p in zip(self.weights, self.params, strict=True)]
        generator = torch.Generator(changes[0].device)
        generator.manual_seed(step * dist.get_world_size() + self.mesh.rank)
        group = self.mesh.group("islands")
        for bucket in in_buckets(changes):
            flat = torch.cat([change.flatten() for change in bucket])
            average_flat(flat, self.plan.grad_compression, group, generator)
            torch._foreach_copy_(bucket, views_of(flat, bucket))
        return changes

    @torch.no_grad()
    def put_outer_weights(self) -> None:
        """Copy the weights of the last outer step into the model."""
        for p, weight in zip(self.params, self.weights, strict=True):
            local(p).copy_(local(weight))

    def saved_weights(self) -> dict[str, LocalPart]:
        """The weights of the last outer step."""
        return self.parts_of(self.weights)

    def saved_parts(self) -> dict[str, dict[str, LocalPart]]:
        """The outer momentum, and each island's current weights."""
        inner, parts = self.parts_of([p.detach() for p in self.params]), {}
        for name, momentum in self.parts_of(self.momentum).items():
            parts[name] = {"outer_momentum": momentum, "inner": inner[name].in_row(*self.place)}
        return parts

    def parts_of(self, tensors: list[Tensor]) -> dict[str, LocalPart]:
        """This rank's parts, by parameter name, of tensors that are divided as the parameters are."""
        named = zip(self.model.named_parameters(), tensors, strict=True)
        return {name: local_part_of(tensor, splits_of(p)) for (name, p), tensor in named}


def notes(plan: Plan, config: dict) -> list[str]:
    """A sentence if a run with train.py's settings ends long after its last outer step."""
    steps = int(config["max_iters"]) + 1
    left = steps % plan.local_steps
    if plan.islands == 1 or config["eval_only"] or left < 2:  # often, max_iters and not steps is a multiple
        return []
    longer = steps - left + plan.local_steps
    option = f"--max_iters={longer - 1}"
    if config["max_tokens"]:
        option = f"--max_tokens={longer * plan.sequences * plan.model_args['block_size']}"
    return [
        f"evaluations and exports will not contain the last {left} of {steps} steps, since islands are "
        f"averaged after every {plan.local_steps} (local_steps): set {option}, or a smaller --local_steps"
    ]


def make_islands(model: nn.Module, mesh: Mesh, plan: Plan) -> Islands | None:
    """Make the Islands of a plan (all ranks); None if there is only one."""
    return Islands(model, mesh, plan) if mesh.islands > 1 else None
