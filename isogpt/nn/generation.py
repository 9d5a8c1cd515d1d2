"""Text generation: the loop over tokens, sampling, and Linear layers for inference."""

import copy
import sys
from dataclasses import dataclass, replace
from textwrap import shorten

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from isogpt.common.random_numbers import SAMPLING, random_bits
from isogpt.nn.experts import ExpertLinear
from isogpt.nn.kernels import KVCache
from isogpt.nn.logits import CHECKED_TOKENS, compare_logits, random_sequences


class InferenceLinear(nn.Module):
    """
    A Linear layer whose weights are stored in `dtype`, to which the input is cast. The layer cannot be
    trained.

    On a CPU the weights can be packed: stored in oneDNN's blocked layout. F.linear with 10 rows took 2.2
    times as long in float32 and 1.3 times as long in bfloat16 (GPT-2's shapes, torch 2.13).
    """

    def __init__(self, linear: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        weight = linear.weight.detach().to(dtype)
        can_pack = weight.device.type == "cpu" and torch.backends.mkldnn.is_available()
        if can_pack and dtype == torch.bfloat16:
            can_pack = torch.ops.mkldnn._is_mkldnn_bf16_supported()
        self.is_packed = can_pack and dtype != torch.float16
        if self.is_packed:
            weight = torch.ops.mkldnn._reorder_linear_weight(weight)
        # buffers, because a CUDA graph reads them where they are and copies other tensors each time
        self.register_buffer("weight", weight, persistent=False)
        bias = None if linear.bias is None else linear.bias.detach().to(dtype)
        self.register_buffer("bias", bias, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.dtype)
        if self.is_packed:
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return F.linear(x, self.weight, self.bias)


def prepare(model: nn.Module, dtype: torch.dtype) -> None:
    """
    Replace the Linear layers of a model by InferenceLinear and convert the experts to `dtype`, in place. The
    residual stream, the norms and the routers stay in float32, as under autocast. Autocast would cast the
    weights again for each token.
    """
    for module in list(model.modules()):
        if isinstance(module, ExpertLinear):
            module.to(dtype)
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:  # a subclass may compute something else
                setattr(module, name, InferenceLinear(child, dtype))


def problem_of_prepare(model: nn.Module, dtype: torch.dtype) -> str:
    """
    Check on a small model that `prepare` leaves its logits as they are: an edited model may read the weights
    of a Linear layer itself.

    Returns:
        '', or why the model must be left in float32 and computed under autocast, as a note for the user.
    """
    c, device, prepared = model.config, next(model.parameters()).device, copy.deepcopy(model)
    prepare(prepared, dtype)
    tokens = random_sequences(c, min(8, c.block_size), device)
    wte = model.transformer.wte
    problem = compare_logits(lambda x: prepared(x)[0], lambda x: model(x)[0], tokens, dtype, embedding=wte)
    note = "generating under autocast (slower), since with the weights of Linear layers packed"
    return problem and f"{note} {problem}"


@dataclass(frozen=True)
class Choice:
    """How a token is chosen, see GPT.generate."""

    temperature: float
    top_k: int | None
    top_p: float | None
    vocab_size: int | None


@dataclass
class Samples:
    """
    Samples that are being generated. `advance` changes the tensors and replaces none of them, so that a CUDA
    graph can read and write them where they are.
    """

    tokens: Tensor  # (B, T + N): the prompt that is used, then the new tokens
    numbers: Tensor  # (N, B, 1): the random number of each new token
    caches: list[KVCache]  # one per block, or none: then all positions are computed again for each token
    newest: Tensor  # (1,): position of the newest token
    choice: Choice


def problem_of_cache(model: nn.Module, idx: Tensor, max_new_tokens: int, splits_layers: bool = False) -> str:
    """
    Check that `generate` computes the same with a cache as without one, which is not so if layers of an
    edited model read earlier positions without the cache.

    The first row of `idx` (B, T) is continued by pseudo-random ids. The last two tokens each take a step
    after a cached prefix, and their logits are compared with those without a cache. Autocast is off, because
    smaller differences can be seen in float32. Nothing is compared while dropout is active, since each pass
    would drop something else.

    Args:
        splits_layers: several processes divide the layers. What the model raises with a cache is raised
            again, because the other processes wait for this one.

    Returns:
        '', or why `generate` must not use a cache, as a note for the user.
    """
    c = model.config
    prompt = idx[:1, -c.block_size :]
    # in a prefix of one token, no layer can read an earlier position
    length = min(c.block_size, max(4, prompt.size(1) + max_new_tokens), CHECKED_TOKENS)
    first = max(1, length - 2)  # position of the first step
    if max_new_tokens < 2 or first == length or (model.training and c.dropout):
        return ""
    following = random_sequences(c, length, idx.device)
    with torch.autocast(idx.device.type, enabled=False):
        problem = compare_logits(
            lambda tokens: logits_of_steps(model, tokens, first),  # (1, 2, V)
            lambda tokens: torch.cat([model(tokens[:, :end])[0] for end in range(first + 1, length + 1)], 1),
            (torch.cat((prompt, tokens), 1)[:, :length] for tokens in following),
            errors=() if splits_layers else Exception,
            embedding=None if splits_layers else model.transformer.wte,
        )
    note = "generating without the cache (slower), since with it"
    return problem and f"{note} {problem}"


def logits_of_steps(model: nn.Module, tokens: Tensor, first: int) -> Tensor:
    """
    Return the logits of the tokens (1, T) from position `first` on, (1, T - first, V), each computed in a
    step after the cached ones, with the kind of cache that `generate` uses.
    """
    caches = [KVCache(1, tokens.size(1)) for _ in range(model.config.n_layer)]
    model(tokens[:, :first], caches=caches)
    steps = tokens[:, first:].split(1, dim=1)
    if not has_fixed_shape(model, caches):
        return torch.cat([model(token, caches=caches)[0] for token in steps], dim=1)
    newest, logits = torch.tensor([first], device=tokens.device), []
    for cache in caches:
        cache.fix_shape(newest)
    for token in steps:
        logits.append(model(token, positions=newest, caches=caches)[0])
        newest.add_(1)
    return torch.cat(logits, dim=1)


def has_fixed_shape(model: nn.Module, caches: list[KVCache]) -> bool:
    """
    Whether the tokens after the ones in these caches are generated in steps of one shape: with a compiled
    step, and on a GPU always, because on Hopper and Blackwell, cuDNN plans attention again for each new
    length of the keys, which takes 0.4 s. In a pipeline, the caches of other processes' blocks contain no
    tensors.
    """
    if any(cache.k is None for cache in caches):
        return False
    return model.seams.advance is not None or caches[0].k.device.type == "cuda"


@torch.no_grad()
def generate(
    model: nn.Module,
    idx: Tensor,
    max_new_tokens: int,
    choice: Choice,
    use_cache: bool,
    seed: int | None,
    first_sample: int,
) -> Tensor:
    """See GPT.generate. With `use_cache`, `problem_of_cache` must have found none."""
    B, block_size, device = len(idx), model.config.block_size, idx.device
    seed = int(torch.randint(2**62, (), device="cpu")) if seed is None else seed
    numbers = uniform_numbers(seed, range(first_sample, first_sample + B), max_new_tokens).to(device)
    used = idx[:, -block_size:]
    T = used.size(1)
    end = T + max_new_tokens
    n_caches = model.config.n_layer if use_cache and max_new_tokens > 1 else 0
    caches = [KVCache(B, min(block_size, end)) for _ in range(n_caches)]
    tokens = torch.cat((used, idx.new_empty(B, max_new_tokens)), dim=1)  # (B, T + max_new_tokens)
    samples = Samples(tokens, numbers, caches, torch.tensor([T], device=device), choice)
    known = min(T + 1, end)
    append_tokens(model, samples, range(T, known))
    if caches and has_fixed_shape(model, caches):
        if model.seams.advance is None:
            model.seams = replace(model.seams, advance=advance)
        # the position embeddings of GPT-2 end at block_size
        known = end if model.arch.rotation else min(end, block_size + 1)
        append_in_fixed_shape(model, samples, range(T + 1, known))
    append_tokens(model, samples, range(known, end))
    return torch.cat((idx, tokens[:, T:]), dim=1)


def append_tokens(model: nn.Module, samples: Samples, positions: range) -> None:
    """Choose the tokens of these positions, with shapes that grow with the position."""
    tokens, caches, block_size = samples.tokens, samples.caches, model.config.block_size
    first = tokens.size(1) - len(samples.numbers)  # position of the first new token
    for end in positions:
        # past block_size, the position embeddings of all tokens change
        is_cached = bool(caches) and (model.arch.rotation != 0 or end <= block_size)
        start = caches[0].length if is_cached else max(0, end - block_size)
        new = tokens[:, start:end]
        if end == first and bool((new == new[:1]).all()):
            new = new[:1]  # all samples continue one prompt
        logits, _ = model(new, caches=caches if is_cached else None)  # (B or 1, 1, V)
        tokens[:, end : end + 1] = choose(logits, samples.numbers[end - first], samples.choice)


def append_in_fixed_shape(model: nn.Module, samples: Samples, positions: range) -> None:
    """
    Choose the tokens of these positions, which follow cached positions. The host does not wait for a GPU. If
    the seam `advance` cannot be compiled, the steps are not compiled, with a note.
    """
    tensors = [samples.tokens, samples.numbers, samples.newest]
    for cache in samples.caches:
        cache.fix_shape(samples.newest)
        tensors += [cache.k, cache.v]
    for tensor in tensors:
        # a CUDA graph copies all other tensors in each step, and refuses to write to them
        torch._dynamo.mark_static_address(tensor, guard=False)
    for position in positions:
        try:
            model.seams.advance(model, samples)
        except Exception as e:  # a broken compiler can raise nearly anything
            if model.seams.advance is advance:
                raise
            reason = f"{type(e).__name__}: {shorten(str(e), 300)}"
            note = f"note: compile: failed, generating without it (slower): {reason}"
            print(note, file=sys.stderr)
            model.seams = replace(model.seams, advance=advance)
            samples.newest.fill_(position - 1)  # the failed step may have increased it
            advance(model, samples)


def advance(model: nn.Module, samples: Samples) -> None:
    """
    Choose the token after the newest one, with caches of one shape. Nothing in this step depends on the host:
    a CUDA graph of it can be launched again and again.
    """
    tokens, numbers, newest = samples.tokens, samples.numbers, samples.newest
    first = tokens.size(1) - len(numbers)  # position of the first new token
    token = tokens.index_select(1, newest)  # (B, 1)
    logits, _ = model(token, positions=newest, caches=samples.caches)  # (B, 1, V)
    newest.add_(1)
    uniform = numbers.index_select(0, newest - first)[0]  # (B, 1)
    tokens.index_copy_(1, newest, choose(logits, uniform, samples.choice))


def uniform_numbers(seed: int, samples: range, n: int) -> Tensor:
    """
    Return random numbers in [0, 1) for n tokens of these samples, (n, B, 1). A sample's numbers depend on
    (seed, sample) alone, and the first numbers do not depend on n. The numbers are multiples of 2^-23, so
    that the product with a float32 is smaller than the float32.
    """
    bits = np.array([random_bits(seed, SAMPLING, sample, n) for sample in samples]).T  # (n, B)
    return torch.from_numpy((bits >> np.uint64(41)).astype(np.float32) / 2**23)[:, :, None]


def running_sum(values: Tensor, width: int = 256) -> Tensor:
    """
    Return the running sum of (B, V) along V: in pieces of `width`, then over the sums of the pieces. In one
    piece, torch.compile of torch 2.11 cannot divide the sum over a GPU's blocks.
    """
    pieces = F.pad(values, (0, -values.size(1) % width)).unflatten(1, (-1, width))  # (B, V / width, width)
    within = pieces.cumsum(-1)
    sums = within[:, :, -1].cumsum(-1)  # (B, V / width)
    before = F.pad(sums[:, :-1], (1, 0))
    return (within + before[:, :, None]).flatten(1)[:, : values.size(1)].contiguous()


def choose(logits: Tensor, uniform: Tensor, choice: Choice) -> Tensor:
    """
    Choose one token per row, by inverting the cumulative distribution. top_k is applied before top_p, which
    is nucleus sampling (Holtzman et al. 2019, arXiv:1904.09751).

    Args:
        logits: of the last position, (B or 1, 1, V).
        uniform: a random number in [0, 1) for each row, (B, 1).

    Returns:
        (B, 1)
    """
    logits = logits[:, -1, : choice.vocab_size].float().expand(len(uniform), -1)  # (B, V)
    if choice.temperature < 1e-30:  # dividing by less would overflow
        return logits.argmax(-1, keepdim=True)
    V, ids = logits.size(-1), None
    k = min(choice.top_k or V, V)
    is_nucleus = choice.top_p is not None and choice.top_p < 1
    if is_nucleus or k < V:
        logits, ids = logits.topk(k)  # (B, k) each, the most likely token first
    cumulative = running_sum((logits / choice.temperature).softmax(-1))  # (B, k)
    total = cumulative[:, -1:]  # (B, 1)
    if is_nucleus:  # the nucleus ends with the token that brings the sum to top_p
        # not searchsorted, which Triton cannot compile for a constant (torch 2.13)
        last = (cumulative < choice.top_p).sum(-1, keepdim=True).clamp(max=k - 1)
        total = cumulative.gather(1, last)
    token = torch.searchsorted(cumulative, uniform * total, right=True)  # (B, 1)
    return token if ids is None else ids.gather(1, token)
