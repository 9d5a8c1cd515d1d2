"""
Statistics of the layers: norms of weights, gradients and updates, the size of activations, and the largest
attention logits. They are the same numbers on any layout, up to rounding, and change no bit of a run.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain

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


def parts_with_output(model: nn.Module) -> dict[str, nn.Module]:
    """
    Return this rank's blocks ("3") and those of their parts that consist of modules, such as attention and
    MLP ("3.attn").
    """
    parts = {}
    for number, block in model.transformer.h.named_children():
        parts[number] = block
        for name, part in block.named_children():
            if any(True for _ in part.children()):
                parts[f"{number}.{name}"] = part
    return parts


def parts_with_attention(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of this rank's blocks that may call `attention` of model.Seams."""
    return {
        f"{number}.{name}".rstrip("."): module
        for number, block in model.transformer.h.named_children()
        for name, module in block.named_modules()
        if hasattr(module, "seams")
    }


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
        if not torch.is_tensor(x) or not x.is_floating_point() or x.dim() < 2 or len(x) != len(self.is_read):
            return
        squares = torch.linalg.vector_norm(x.flatten(1), dim=1, dtype=torch.float32)
        squares = squares.to(number_dtype(x.device)).square()  # (B,)
        both = torch.stack((squares, torch.full_like(squares, x[0].numel())))
        both = both.masked_fill(~self.is_read, 0).sum(1)
        self.outputs[name] = self.outputs[name] + both if name in self.outputs else both

    def attend(self, name: str, attention: Callable, q: Tensor, k: Tensor, *others: object) -> Tensor:
        """Call the `attention` of model.Seams, and observe its queries and keys."""
        if q.dim() == 4 and q.shape[:2] == k.shape[:2] == (len(self.is_read), len(self.queries)):
            keys = gathered(k, self.group) if self.group else k
            largest = largest_logit(q, keys, self.queries, self.keys)
            largest = largest.masked_fill(~self.is_read, -torch.inf).amax()
            before = self.logits.get(name, largest)
            self.logits[name] = torch.maximum(before, largest)
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
    """In the block, the model's forward passes add to `observed`; they run uncompiled."""
    parts = parts_with_output(model)
    hooks = [part.register_forward_hook(partial(observed.add_output, name)) for name, part in parts.items()]
    seams = []
    for name, module in parts_with_attention(model).items():
        seams.append((module, module.seams))
        attend = partial(observed.attend, name, module.seams.attention)
        module.seams = replace(module.seams, attention=attend)
    try:
        # torch.compile would trace the hooks. The import takes a second where nothing is compiled
        with torch.compiler.set_stance("force_eager") if is_compiled(model) else nullcontext():
            yield
    finally:
        for hook in hooks:
            hook.remove()
        for module, before in reversed(seams):  # two names of one module: the first is restored last
            module.seams = before


@dataclass
class LayerStatistics:
    """
    Measures the layers every `interval` steps (0: never) (all ranks).

    Weights and gradients are measured before the update, and gradients before they are clipped; an update is
    the change of the weights. Where ranks hold different values of the same parameter, as islands do, a norm
    is the root of their mean square. Activations and attention logits are those of an additional forward pass
    without dropout over `sequences` of the training data, the same in every step.

    Such a step takes memory for a copy of this rank's weights, and the time of the forward pass, which is not
    compiled. The host waits for the GPU once.

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
            self.batches = [
                (x, y, (y != IGNORE).any(1)) for x, y in self.reader.evaluation("train", self.sequences)
            ]
        self.group, self.queries = mesh.group("cp"), mesh.own_positions(self.reader.block_size)
        if self.queries is None:
            self.queries = torch.arange(self.reader.block_size)
        self.queries = self.keys = self.queries.to(device)
        if self.group:
            self.keys = gathered(self.queries[None], self.group)[0]
        parameters = {short_name(name): p for name, p in self.raw_model.named_parameters()}
        self.names = of_all_ranks(parameters)
        self.outputs = of_all_ranks(parts_with_output(self.raw_model))
        self.attentions = of_all_ranks(parts_with_attention(self.raw_model))
        self.parameters = list(parameters.values())
        self.places = torch.tensor([self.names.index(name) for name in parameters], device=device)
        groups = parameters_by_replica_count(self.raw_model, mesh)
        copies = {p: n for n, params in groups.items() for p in params}
        self.copies = torch.tensor(
            [copies[p] for p in self.parameters], dtype=number_dtype(device), device=device
        )

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
        grads = [p.new_zeros(()) if p.grad is None else local(p.grad) for p in self.parameters]
        squares = [self.squares(self.weights()), self.squares(grads)]
        before = [weight.clone() for weight in self.weights()]
        yield
        torch._foreach_sub_(before, self.weights())
        squares.append(self.squares(before))
        self.logger.write({"iter": step, "statistics": self.over_ranks(squares, observed)})

    def weights(self) -> list[Tensor]:
        """This rank's parts of the parameters."""
        return [local(p.detach()) for p in self.parameters]

    @torch.no_grad()
    def observe(self) -> Observed:
        """Run the forward pass over this rank's sequences (all ranks)."""
        observed = Observed(self.queries, self.keys, self.group)
        self.model.eval()
        with observing(self.raw_model, observed), self.autocast:
            for x, y, is_read in self.batches:
                observed.is_read = is_read
                self.model(x, y, 1.0)
        self.model.train()
        reshard(self.model)
        if self.queries.is_cuda:  # with cpu_offload, the update must not change weights that are being copied
            torch.cuda.current_stream().synchronize()
        return observed

    @torch.no_grad()
    def squares(self, tensors: list[Tensor]) -> Tensor:
        """This rank's share of the squared norms of all parameters, in the order of `names`."""
        norms = torch.stack(torch._foreach_norm(tensors)).to(self.copies)
        shares = norms.square() / self.copies
        return shares.new_zeros(len(self.names)).index_copy_(0, self.places, shares)

    def over_ranks(self, squares: list[Tensor], observed: Observed) -> dict[str, dict[str, float]]:
        """
        Return the statistics by name, without parts that were not seen, in two small collectives (all ranks).

        Args:
            squares: of weights, gradients and updates.
        """
        zero = squares[0].new_zeros(2)
        outputs = torch.stack([observed.outputs.get(name, zero) for name in self.outputs], 1)
        sums = torch.cat((*squares, *outputs))
        largest = sums.new_full((len(self.attentions),), -torch.inf)
        for name, logit in observed.logits.items():
            largest[self.attentions.index(name)] = logit
        if dist.is_initialized():
            dist.all_reduce(sums)
            dist.all_reduce(largest, dist.ReduceOp.MAX)
        sizes = 3 * [len(self.names)] + 2 * [len(self.outputs)]
        weights, grads, updates, outputs, counts = sums.split(sizes)
        named = {
            "weight_norm": zip(self.names, weights.sqrt().tolist(), strict=True),
            "grad_norm": zip(self.names, grads.sqrt().tolist(), strict=True),
            "update_norm": zip(self.names, updates.sqrt().tolist(), strict=True),
        }
        rms = zip(self.outputs, (outputs / counts).sqrt().tolist(), counts.tolist(), strict=True)
        named["activation_rms"] = [(name, size) for name, size, count in rms if count]
        logits = zip(self.attentions, largest.tolist(), strict=True)
        named["attention_logit"] = [(name, logit) for name, logit in logits if logit != -torch.inf]
        return {kind: dict(pairs) for kind, pairs in named.items()}


def of_all_ranks(names: Iterable[str]) -> list[str]:
    """The names that any rank has, since a stage of a pipeline contains only some (all ranks)."""
    return list(dict.fromkeys(chain(*gather_objects(list(names)))))
