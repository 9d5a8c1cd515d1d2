"""
Statistics of the layers: norms of weights, gradients and updates, the size of activations, and the largest
attention logits. They are the same numbers on any layout, up to rounding, and change no bit of a run.
"""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from isogpt.data.reader import Reader
from isogpt.launch.together import exit_together, gather_objects, number_dtype
from isogpt.monitor.log import Logger
from isogpt.nn.kernels import IGNORE
from isogpt.parallel.compilation import is_compiled
from isogpt.parallel.data_parallel import reshard
from isogpt.parallel.gradients import parameters_by_replica_count
from isogpt.parallel.local_parts import local
from isogpt.parallel.sequence_collectives import gathered

LOGITS_AT_ONCE = 2**24  # attention logits in memory at once, 64 MiB in float32


def short_name(name: str) -> str:
    """The name of a parameter in a record: transformer.h.3.attn.c_attn.weight becomes 3.attn.c_attn."""
    name = re.sub(r"^h\.(?=\d)", "", name.removeprefix("transformer."))
    return name.removesuffix(".weight")


@dataclass
class Observed:
    """
    What forward passes show of each part of the model, by its name, added up over micro-batches.

    Args:
        queries, keys: the positions of the queries and of the keys of this rank and the ranks with which it
            divides each sequence, (T / cp,) and (T,).
        group: the group of these ranks; None if this rank is alone.
    """

    queries: Tensor
    keys: Tensor
    group: dist.ProcessGroup | None
    is_read: Tensor | None = None  # which rows of the micro-batch are not padding, (B,)
    outputs: dict[str, Tensor] = field(default_factory=dict)  # (sum of squares, how many numbers)
    logits: dict[str, Tensor] = field(default_factory=dict)  # the largest

    def add_output(self, name: str, module: nn.Module, args: tuple, output: Tensor | tuple) -> None:
        """Add a part's output (B, ...), or the first of its outputs (a forward hook)."""
        x = output[0] if isinstance(output, tuple) and output else output
        if not torch.is_tensor(x) or not x.is_floating_point():
            return
        if x.dim() < 2 or len(x) != len(self.is_read):
            return
        norms = torch.linalg.vector_norm(x.flatten(1), dim=1, dtype=torch.float32)
        squares = norms.to(number_dtype(x.device)).square()  # (B,)
        both = torch.stack((squares, torch.full_like(squares, x[0].numel())))
        both = both.masked_fill(~self.is_read, 0).sum(1)
        self.outputs[name] = both + self.outputs.get(name, 0)

    def attend(self, name: str, attention: Callable, q: Tensor, k: Tensor, *others: object) -> Tensor:
        """Call the `attention` of model.Seams, and observe its queries and keys."""
        rows = len(self.is_read), len(self.queries)
        if q.dim() == 4 and q.shape[:2] == k.shape[:2] == rows:
            keys = gathered(k, self.group) if self.group else k
            largest = largest_logit(q, keys, self.queries, self.keys)
            largest = largest.masked_fill(~self.is_read, -torch.inf).amax()
            self.logits[name] = largest.maximum(self.logits.get(name, largest))
        return attention(q, k, *others)


def largest_logit(q: Tensor, k: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """
    Return the largest q k^T / sqrt(D) over heads and over pairs of positions in which the key does not come
    after the query, for each sequence, (B,).

    Args:
        q, k: queries (B, T, H, D) and keys (B, S, K, D) of any order, with their positions (T,) and (S,).
    """
    B, _, H, D = q.shape
    k = k.repeat_interleave(H // k.size(2), 2).permute(0, 2, 3, 1)  # (B, H, D, S)
    at_once = max(1, LOGITS_AT_ONCE // (B * H * len(keys)))
    largest = []
    for part, places in zip(q.split(at_once, 1), queries.split(at_once), strict=True):
        logits = (part.transpose(1, 2) * D**-0.5) @ k  # (B, H, queries at once, S)
        logits = logits.masked_fill(keys > places[:, None], -torch.inf)
        largest.append(logits.amax((1, 2, 3)))
    return torch.stack(largest).amax(0).float()


@contextmanager
def observing(model: nn.Module, observed: Observed) -> Iterator[None]:
    """
    In the block, the model's forward passes add to `observed` what its blocks ("3") return, and those of
    their parts that consist of modules, such as attention ("3.attn"). They run uncompiled.
    """
    with ExitStack() as changes:  # undone in reverse order, since two blocks may share a module
        for number, block in model.transformer.h.named_children():
            for path, part in block.named_modules():
                name = f"{number}.{path}".rstrip(".")
                if "." not in path and [*part.children()]:
                    hook = partial(observed.add_output, f"activation_rms/{name}")
                    changes.enter_context(part.register_forward_hook(hook))
                if hasattr(part, "seams"):
                    changes.callback(setattr, part, "seams", part.seams)
                    attend = partial(observed.attend, name, part.seams.attention)
                    part.seams = replace(part.seams, attention=attend)
        # torch.compile would trace the hooks. The import takes a second where nothing is compiled
        if is_compiled(model):
            changes.enter_context(torch.compiler.set_stance("force_eager"))
        yield


@dataclass
class LayerStatistics:
    """
    Measures the layers every `interval` steps (0: never) (all ranks).

    Weights and gradients are measured before the update, and gradients before they are clipped; an update is
    the change of the weights. Where ranks hold different values of the same parameter, as islands do, a norm
    is the root of their mean square. Activations and attention logits are those of an additional forward pass
    without dropout over `sequences` of the training data, the same in every step.

    Such a step takes memory for a copy of this rank's weights, and the time of the forward pass, which is not
    compiled. The host waits for the GPU.

    Args:
        model: the model as evaluations call it.
        raw_model: the model whose parameters are updated.
    """

    interval: int
    model: nn.Module
    raw_model: nn.Module
    reader: Reader
    sequences: int
    autocast: AbstractContextManager
    logger: Logger

    def __post_init__(self) -> None:
        if not self.interval:
            return
        mesh, device = self.reader.mesh, self.reader.device
        with exit_together():
            self.batches = [*self.reader.evaluation("train", self.sequences)]
        self.group = mesh.group("cp")
        self.keys = self.queries = torch.arange(self.reader.block_size, device=device)
        if self.group:
            self.queries = mesh.positions(self.reader.block_size).to(device)
            self.keys = gathered(self.queries[None], self.group)[0]
        names = {p: short_name(name) for name, p in self.raw_model.named_parameters()}
        self.parameters, copies = {}, []
        for n, params in parameters_by_replica_count(self.raw_model, mesh).items():
            self.parameters |= {names[p]: p for p in params}
            copies += [n] * len(params)
        self.copies = torch.tensor(copies, dtype=number_dtype(device), device=device)

    @contextmanager
    def of_update(self, step: int) -> Iterator[None]:
        """
        Measure the layers before the block, and the update that is made in the block, and write the record
        (all ranks).
        """
        if not self.interval or step % self.interval:
            yield
            return
        observed = self.observe()
        weights = [local(p.detach()) for p in self.parameters.values()]
        grads = [p.new_zeros(()) if p.grad is None else local(p.grad) for p in self.parameters.values()]
        before = [weight.clone() for weight in weights]
        sums = self.squares("weight_norm", weights) | self.squares("grad_norm", grads)
        yield
        torch._foreach_sub_(before, weights)
        sums |= self.squares("update_norm", before) | observed.outputs
        statistics = defaultdict(dict)  # {kind: {name: number}}
        zeros = self.copies.new_zeros(2)
        for key, (square, count) in self.reduced(sums, zeros, dist.ReduceOp.SUM).items():
            kind, _, name = key.partition("/")
            statistics[kind][name] = math.sqrt(square / (count or 1))
        logits = self.reduced(observed.logits, zeros[0] - math.inf, dist.ReduceOp.MAX)
        statistics["attention_logit"] = logits
        self.logger.write({"iter": step, "statistics": statistics})

    @torch.no_grad()
    def observe(self) -> Observed:
        """Run the forward pass over this rank's sequences (all ranks)."""
        observed = Observed(self.queries, self.keys, self.group)
        self.model.eval()
        with observing(self.raw_model, observed), self.autocast:
            for x, y in self.batches:
                observed.is_read = (y != IGNORE).any(1)
                self.model(x, y, 1.0)
        self.model.train()
        reshard(self.model)
        if self.reader.plan.cpu_offload and self.queries.is_cuda:
            # the update must not change weights that are still being copied to the GPU
            torch.cuda.current_stream().synchronize()
        return observed

    @torch.no_grad()
    def squares(self, kind: str, tensors: list[Tensor]) -> dict[str, Tensor]:
        """This rank's share of the squared norm of each parameter, and 0, since it is not a mean."""
        norms = torch.stack(torch._foreach_norm(tensors, 2, self.copies.dtype)).to(self.copies)
        squares = norms.square() / self.copies
        rows = torch.stack((squares, torch.zeros_like(squares)), 1)
        return {f"{kind}/{name}": row for name, row in zip(self.parameters, rows, strict=True)}

    def reduced(self, numbers: dict[str, Tensor], neutral: Tensor, how: dist.ReduceOp) -> dict[str, Any]:
        """Reduce the numbers by name; a rank that has none has the neutral one (all ranks)."""
        names = dict.fromkeys(chain(*gather_objects(list(numbers))))  # a stage of a pipeline has only some
        if not names:
            return {}
        table = torch.stack([numbers.get(name, neutral).to(neutral) for name in names])
        if dist.is_initialized():
            dist.all_reduce(table, how)
        return dict(zip(names, table.tolist(), strict=True))
