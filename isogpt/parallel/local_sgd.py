"""
Local SGD: groups of ranks (islands) take steps separately and average their weights periodically, for
networks that are too slow to send gradients at every step. With an outer optimizer this is DiLoCo (Douillard
et al. 2023, arXiv:2311.08105).
"""

from collections.abc import Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta

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

    Every `local_steps` steps, the mean change of the islands' weights is the gradient of an outer step, from
    which all islands continue. The outer step is SGD with Nesterov momentum (Sutskever et al. 2013). Each
    island keeps the moments of its inner optimizer. Learning rate 1 without momentum is Local SGD (Stich
    2018, arXiv:1805.09767).

    With several outer_parts, each part of the model is averaged after a different local step
    (Douillard et al. 2025, arXiv:2501.18512). The average is computed in the background, until the
    next part is due; what an island learns in the meantime is kept.
    """

    model: nn.Module
    mesh: Mesh
    plan: Plan
    group: dist.ProcessGroup = field(init=False)
    params: dict[str, nn.Parameter] = field(init=False)
    names: list[list[str]] = field(init=False)  # names of the parameters in each part
    weights: dict[str, Tensor] = field(init=False)  # weights after the last outer step, equal on all islands
    momentum: dict[str, Tensor] = field(init=False)
    # this island's weights whose mean is being computed
    sent: dict[str, Tensor] = field(default_factory=dict)
    averaged_at: int = -1  # the step after which the last average was started
    pending: Future | None = None
    # stream of the background thread; a single stream, since the allocator reserves memory for each stream
    stream: "torch.cuda.Stream | None" = None
    thread: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="islands")
    )

    def __post_init__(self) -> None:
        ranks = dist.get_world_size() // self.mesh.islands  # of an island
        groups = [[rank + i * ranks for i in range(self.mesh.islands)] for rank in range(ranks)]
        # a separate group, since the background thread uses it
        group, _ = dist.new_subgroups_by_enumeration(groups, timedelta(seconds=self.mesh.timeout_s))
        self.group = self.mesh.limit(group)
        self.params = dict(self.model.named_parameters())
        self.names = self.names_by_part()

    def names_by_part(self) -> list[list[str]]:
        """Divide the parameters, in their order, into outer_parts parts of about equal size."""
        total = sum(p.numel() for p in self.params.values())
        names = [[] for _ in range(self.plan.outer_parts)]
        before = 0
        for name, p in self.params.items():
            names[before * self.plan.outer_parts // total].append(name)
            before += p.numel()
        return names

    def restart(self, step: int, saved: Collection[str] = (), averaged_at: int | None = None) -> None:
        """
        Start from the model's weights before step `step`, without momentum.

        Args:
            saved: the names (see state.flat) in a checkpoint; allocates what was being sent.
            averaged_at: from the checkpoint; None: no average is due from earlier steps.
        """
        self.wait()
        self.pending = None
        self.weights = {name: p.detach().clone() for name, p in self.params.items()}
        self.momentum = {name: torch.zeros_like(weight) for name, weight in self.weights.items()}
        self.sent = {
            name: torch.empty_like(w) for name, w in self.weights.items() if f"optim.{name}.sent" in saved
        }
        self.averaged_at = step - 1 if averaged_at is None else averaged_at

    def due_after(self, step: int) -> list[int]:
        """
        Return the parts whose averaging starts after a step that was taken. These are the parts that are due
        after this step, or after earlier steps that were skipped.
        """
        first = max(self.averaged_at, step - self.plan.local_steps) + 1
        passed = {(s + 1) % self.plan.local_steps for s in range(first, step + 1)}
        turns = [
            (part + 1) * self.plan.local_steps // self.plan.outer_parts % self.plan.local_steps
            for part in range(self.plan.outer_parts)
        ]
        return [part for part, turn in enumerate(turns) if turn in passed]

    def after_step(self, step: int) -> None:
        """Average what is due after an inner step (all ranks)."""
        due = self.due_after(step)
        if not due:
            return
        self.finish()
        self.averaged_at = step
        self.sent = {name: self.params[name].detach().clone() for part in due for name in self.names[part]}
        self.start()
        if self.plan.outer_parts == 1:
            self.finish()

    def start(self) -> None:
        """Start to compute the mean change of the weights in `sent`, in the background (all ranks)."""
        changes = [local(self.weights[name]) - local(sent) for name, sent in self.sent.items()]
        if not changes:  # in a small model some parts are empty
            return
        ready = torch.cuda.current_stream().record_event() if changes[0].is_cuda else None
        self.pending = self.thread.submit(self.average, changes, self.averaged_at, ready)

    def average(
        self, changes: list[Tensor], step: int, ready: "torch.cuda.Event | None"
    ) -> tuple[list[Tensor], "torch.cuda.Event | None"]:
        """
        The mean of each change over the islands (in the background).

        Returns:
            (the means, the event after which a GPU has computed them)
        """
        device = changes[0].device
        generator = torch.Generator(device).manual_seed(step * dist.get_world_size() + self.mesh.rank)
        if ready and not self.stream:
            self.stream = torch.cuda.Stream(device)
        with torch.cuda.stream(self.stream):  # also makes the stream's GPU this thread's current device
            if ready:
                ready.wait()
            for bucket in in_buckets(changes):
                flat = torch.cat([change.flatten() for change in bucket])
                mean = mean_over(flat, self.plan.outer_compression, self.group, generator)
                torch._foreach_copy_(bucket, views_of(mean, bucket))
            done = torch.cuda.current_stream().record_event() if ready else None
        return changes, done

    @torch.no_grad()
    def finish(self) -> None:
        """Take the outer step with the mean change that is being computed, if there is one (all ranks)."""
        if not self.pending:
            return
        reshard(self.model)
        changes, done = self.pending.result()
        self.pending = None
        if done:
            torch.cuda.current_stream().wait_event(done)  # the GPU waits, not the host
        for (name, sent), change in zip(self.sent.items(), changes, strict=True):
            weight, p = local(self.weights[name]), local(self.params[name])
            momentum = local(self.momentum[name]).mul_(self.plan.outer_momentum).add_(change)
            weight.sub_(change.add_(momentum, alpha=self.plan.outer_momentum), alpha=self.plan.outer_lr)
            p.sub_(local(sent)).add_(weight)  # adds what the island has learned since
        self.sent = {}

    def wait(self) -> None:
        """Wait for what runs in the background (all ranks)."""
        if self.pending:
            _, done = self.pending.result()
            if done:
                done.synchronize()

    @contextmanager
    @torch.no_grad()
    def outer_weights(self) -> Iterator[None]:
        """In the block, the model contains the weights of the last outer step, for an evaluation."""
        reshard(self.model)
        inner = {name: local(p).clone() for name, p in self.params.items()}
        for name, p in self.params.items():
            local(p).copy_(local(self.weights[name]))
        try:
            yield
        finally:  # if the evaluation fails, the state is saved
            reshard(self.model)
            for name, p in self.params.items():
                local(p).copy_(inner[name])

    def saved_weights(self) -> dict[str, LocalPart]:
        """The weights of the last outer step."""
        return {
            name: local_part_of(weight, splits_of(self.params[name])) for name, weight in self.weights.items()
        }

    def saved_parts(self) -> dict[str, dict[str, LocalPart]]:
        """The outer momentum, each island's current weights, and the weights that the island has sent."""
        island = (self.mesh.index("islands"), self.mesh.islands)
        parts = {}
        for name, p in self.params.items():
            splits = splits_of(p)
            parts[name] = {
                "outer_momentum": local_part_of(self.momentum[name], splits),
                "inner": local_part_of(p.detach(), splits).in_row(*island),
            }
            if name in self.sent:
                parts[name]["sent"] = local_part_of(self.sent[name], splits).in_row(*island)
        return parts

    def resume(self) -> None:
        """Send again what was being sent when the checkpoint was saved (all ranks)."""
        self.start()
