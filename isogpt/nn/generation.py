"""Text generation: the loop over tokens, sampling, and Linear layers for inference."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from isogpt.common.random_numbers import SAMPLING, random_bits
from isogpt.nn.experts import ExpertLinear
from isogpt.nn.kernels import KVCache


class InferenceLinear(nn.Module):
    """
    A Linear layer whose weights are stored in `dtype`, to which the input is cast. The layer cannot be
    trained.

    On a CPU the weights can be packed: stored in oneDNN's blocked layout. F.linear with 10 rows took 2.2
    times as long in float32 and 1.3 times as long in bfloat16 (GPT-2's shapes, torch 2.13).
    """

    def __init__(self, linear: nn.Linear, dtype: torch.dtype, pack: bool = True) -> None:
        super().__init__()
        self.dtype, self.bias = dtype, None if linear.bias is None else linear.bias.detach().to(dtype)
        self.weight = linear.weight.detach().to(dtype)
        self.is_packed = pack and self.weight.device.type == "cpu" and can_pack(dtype)
        if self.is_packed:
            self.weight = torch.ops.mkldnn._reorder_linear_weight(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.dtype)
        if self.is_packed:
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return F.linear(x, self.weight, self.bias)


def can_pack(dtype: torch.dtype) -> bool:
    """Whether this build and this CPU support oneDNN's matmul with a packed weight in this dtype."""
    if not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or (
        dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


def prepare(model: nn.Module, dtype: torch.dtype, pack: bool = True) -> None:
    """
    Replace the Linear layers of a model by InferenceLinear and convert the experts to `dtype`, in place. The
    residual stream, the norms and the routers stay in float32, as under autocast. Autocast would cast the
    weights again for each token.

    Args:
        pack: pack the weights on a CPU. torch.compile cannot trace packed weights.
    """
    for module in list(model.modules()):
        if isinstance(module, ExpertLinear):
            module.to(dtype)
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, name, InferenceLinear(child, dtype, pack))


@torch.no_grad()
def generate(  # noqa: PLR0913  (sample.py's settings)
    model: nn.Module,
    idx: Tensor,
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    vocab_size: int | None,
    use_cache: bool,
    seed: int | None,
    first_sample: int,
) -> Tensor:
    """See GPT.generate."""
    (B, T), block_size = idx.shape, model.config.block_size
    seed = int(torch.randint(2**62, (), device="cpu")) if seed is None else seed
    numbers = uniform_numbers(seed, range(first_sample, first_sample + B), max_new_tokens).to(idx.device)
    tokens = torch.cat((idx, idx.new_empty(B, max_new_tokens)), dim=1)  # (B, T + max_new_tokens)
    start = max(0, T - block_size)  # the first token that is used
    caches = [KVCache(B, min(block_size, T - start + max_new_tokens)) for _ in range(model.config.n_layer)]
    has_one_prompt = bool((idx == idx[:1]).all())
    for end in range(T, T + max_new_tokens):
        window_moves = not model.arch.rotation and end - start > block_size
        if window_moves:
            start += 1  # the position embeddings of all tokens change
        if window_moves or not use_cache:
            for cache in caches:
                cache.length = 0
        while (cached := caches[0].length) < end - start:
            new = tokens[:, start + cached : min(end, start + max(block_size, cached + 1))]
            logits, _ = model(
                new[:1] if end == T and has_one_prompt else new, caches=caches
            )  # (B or 1, 1, V)
        logits = logits[:, -1, :vocab_size].float().expand(B, -1)  # (B, V)
        tokens[:, end : end + 1] = next_token(logits, numbers[end - T], temperature, top_k, top_p)
    return tokens


def uniform_numbers(seed: int, samples: range, n: int) -> Tensor:
    """
    Return random numbers in [0, 1) for n tokens of these samples, (n, B, 1). A sample's numbers depend on
    (seed, sample) alone, and the first numbers do not depend on n. The numbers are multiples of 2^-23, so
    that the product with a float32 is smaller than the float32.
    """
    bits = np.array([random_bits(seed, SAMPLING, sample, n) for sample in samples]).T  # (n, B)
    return torch.from_numpy((bits >> np.uint64(41)).astype(np.float32) / 2**23)[:, :, None]


def next_token(
    logits: Tensor, uniform: Tensor, temperature: float, top_k: int | None = None, top_p: float | None = None
) -> Tensor:
    """
    Sample one token id per row by inverting the cumulative distribution. top_k is applied before top_p, which
    is nucleus sampling (Holtzman et al. 2019, arXiv:1904.09751).

    Args:
        logits: (B, V).
        uniform: random numbers in [0, 1), (B, 1).

    Returns:
        (B, 1)
    """
    if temperature < 1e-30:  # dividing by less would overflow
        return logits.argmax(-1, keepdim=True)
    V, ids = logits.size(-1), None
    k = min(top_k or V, V)
    is_nucleus = top_p is not None and top_p < 1
    if is_nucleus or k < V:
        logits, ids = logits.topk(k)  # (B, k) each, the most likely token first
    cumulative = (logits / temperature).softmax(-1).cumsum(-1)  # (B, k)
    total = cumulative[:, -1:]  # (B, 1)
    if is_nucleus:  # the nucleus ends with the token that brings the sum to top_p
        last = torch.searchsorted(cumulative, torch.full_like(total, top_p)).clamp(max=k - 1)
        total = cumulative.gather(1, last)
    choice = torch.searchsorted(cumulative, uniform * total, right=True)  # (B, 1)
    return choice if ids is None else ids.gather(1, choice)
