"""
GPT-2 as one module: the model, its optimizer groups, generation with a key/value cache, and GPT-2 weights from
Hugging Face. It knows nothing of processes (DESIGN.md, law 6): parallel.py spreads it from outside.

Names and shapes of the parameters are nanoGPT's, so that checkpoints go both ways: Linear weights are (out, in),
attention's query, key and value are stacked in `c_attn` in that order, `transformer.wte` and `lm_head` are tied.
"""

import hashlib
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import lru_cache, partial

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

IGNORE = -1  # a target that counts for nothing
# tokens that HalfAttentionOnCPU is for; of 4096 torch's kernel is faster. An attribute of the class would end
# torch.compile's graph where it is read
HALF_ATTENTION_UP_TO = 2048


@dataclass
class GPTConfig:
    """The shape of a model. `bias`: biases in Linear and LayerNorm, as GPT-2 has them; False is a little faster."""

    block_size: int = 1024
    vocab_size: int = 50304  # GPT-2's 50257, rounded up to a multiple of 64, which matmuls like
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    dropout: float = 0.0
    bias: bool = True
    gelu: str = "none"  # exact, as in nanoGPT; "tanh": the approximation that OpenAI's and Hugging Face's GPT-2 have

    def __post_init__(self) -> None:
        for name in ("block_size", "vocab_size", "n_layer", "n_head", "n_embd"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be at least 1")
        if self.n_embd % self.n_head:
            raise ValueError(f"n_embd {self.n_embd} is not a multiple of n_head {self.n_head}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout is {self.dropout}: it must be in [0, 1)")


@dataclass
class KVCache:
    """One block's keys and values of the positions seen so far, in buffers made once for the longest sequence."""

    k: Tensor  # (B, n_head, block_size, head_size)
    v: Tensor  # (B, n_head, block_size, head_size)
    length: int = 0

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store T more positions; returns all the keys and values so far."""
        start, self.length = self.length, self.length + k.size(2)
        self.k[:, :, start : self.length] = k
        self.v[:, :, start : self.length] = v
        return self.k[:, :, : self.length], self.v[:, :, : self.length]


def dropout_factors(shape: tuple[int, ...], p: float, dtype: torch.dtype) -> Tensor:
    """
    What dropout multiplies by (CPU): 0 with probability p, to the nearest 1 / 65,536, else 1 / (1 - p). Four elements
    share one 64-bit draw of a generator that torch's seeds, twice as fast as it, and the rest is integer arithmetic:
    ten times as fast as drawing for each.
    """
    n, scale = math.prod(shape), 1 / (1 - p)
    seed = int(torch.randint(2**62, (), device="cpu"))
    bits = torch.from_numpy(np.random.SFC64(seed).random_raw(-(-n // 4)).view(np.int16)[:n]).view(shape)
    kept = bits.ge_(min(round(p * 65536), 65535) - 32768)  # 1: yes
    if dtype.itemsize == 2:
        return kept.mul_(torch.tensor(scale, dtype=dtype).view(torch.int16).item()).view(dtype)
    return kept.to(dtype).mul_(scale)


class Dropout(nn.Dropout):
    """nn.Dropout, with masks that are drawn faster on a CPU."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not 0 < self.p < 1 or x.device.type != "cpu":
            return super().forward(x)
        return x * dropout_factors(x.shape, self.p, x.dtype)


class HalfAttentionOnCPU(torch.autograd.Function):
    """
    Causal self-attention in bfloat16 or float16 on a CPU, from the (B, T, 3, H, D) of `c_attn` to (B, T, H * D).

    torch's kernel for it multiplies small blocks one by one, where a processor with bfloat16 instructions wants large
    ones: forward and backward took 2 to 4 times as long. Here a chunk of queries meets all the keys up to its last
    one, as batched matmuls. The probabilities, (T / 2 + CHUNK / 2) H halves a token, are kept for the backward where
    they are few or dropout needs them, and computed again where they would take as much as the rest of the block.
    """

    CHUNK = 128  # queries at once: more would spend time on pairs that the causal mask throws away
    KEPT = 512  # tokens; of 1024, computing again costs a tenth of attention and saves a third of a block's memory

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, qkv: Tensor, dropout: float) -> Tensor:
        B, T, _, H, D = qkv.shape
        ctx.shape, ctx.dropout, ctx.chunks = (B, T, H, D), dropout, HalfAttentionOnCPU.chunks(T)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).reshape(3, B * H, T, D)  # each (B * H, T, D)
        ctx.keeps = bool(dropout) or T <= HalfAttentionOnCPU.KEPT
        outs, kept = [], []
        for i, j in ctx.chunks:
            p = HalfAttentionOnCPU.probabilities(q, k, i, j)
            if ctx.keeps:
                kept.append(p)
            if dropout:
                kept.append(dropout_factors(p.shape, dropout, p.dtype))
                p = p * kept[-1]
            outs.append(torch.bmm(p, v[:, :j]))
        ctx.save_for_backward(q, k, v, *kept)
        y = outs[0] if len(outs) == 1 else torch.cat(outs, 1)  # (B * H, T, D)
        return y.view(B, H, T, D).transpose(1, 2).reshape(B, T, H * D)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        (B, T, H, D), kept = ctx.shape, list(ctx.saved_tensors)
        q, k, v = kept[:3]
        del kept[:3]
        grad = grad.view(B, T, H, D).transpose(1, 2).reshape(B * H, T, D)
        several = len(ctx.chunks) > 1  # then keys and values collect from each chunk
        parts = grad.new_zeros(3, B * H, T, D) if several else grad.new_empty(3, B * H, T, D)
        dq, dk, dv = parts
        for i, j in ctx.chunks:
            p = kept.pop(0) if ctx.keeps else HalfAttentionOnCPU.probabilities(q, k, i, j)
            g = grad[:, i:j]
            dp, used = torch.bmm(g, v[:, :j].transpose(1, 2)), p
            if ctx.dropout:
                factors = kept.pop(0)
                dp, used = dp.mul_(factors), p * factors
            ds = torch.ops.aten._softmax_backward_data(dp, p, -1, p.dtype)
            dq[:, i:j].baddbmm_(ds, k[:, :j], beta=0, alpha=D**-0.5)
            dk[:, :j].baddbmm_(ds.transpose(1, 2), q[:, i:j], beta=int(several), alpha=D**-0.5)
            dv[:, :j].baddbmm_(used.transpose(1, 2), g, beta=int(several))
        return parts.view(3, B, H, T, D).permute(1, 3, 0, 2, 4), None

    @staticmethod
    def probabilities(q: Tensor, k: Tensor, i: int, j: int) -> Tensor:
        """Of queries i to j over the keys up to j: (B * H, j - i, j)."""
        mask = causal_bias(i, j, q.dtype)  # (j - i, j)
        return torch.baddbmm(mask, q[:, i:j], k[:, :j].transpose(1, 2), alpha=q.size(-1) ** -0.5).softmax(-1)

    @staticmethod
    def chunks(T: int) -> list[tuple[int, int]]:
        """The first query of each chunk and the one after its last."""
        return [(i, min(i + HalfAttentionOnCPU.CHUNK, T)) for i in range(0, T, HalfAttentionOnCPU.CHUNK)]


@lru_cache(maxsize=32)
def causal_bias(i: int, j: int, dtype: torch.dtype) -> Tensor:
    """What is added to the scores of queries i to j against the keys up to j, (j - i, j): -inf for a later key."""
    return torch.full((j - i, j), -math.inf, dtype=dtype).triu(1 + i)


class CausalSelfAttention(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.head_size = config.n_embd // config.n_head
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.resid_dropout = Dropout(config.dropout)
        self.dropout = config.dropout

    def forward(self, x: Tensor, cache: KVCache | None = None) -> Tensor:
        B, T, _ = x.shape
        # the number of heads is read off the local shape: under tensor parallelism a rank holds a part of them
        qkv = self.c_attn(x).view(B, T, 3, -1, self.head_size)
        dropout = self.dropout if self.training else 0.0
        longest = HALF_ATTENTION_UP_TO // (2 if dropout else 1)  # with dropout its factors are kept
        if cache is None and qkv.device.type == "cpu" and qkv.itemsize == 2 and longest >= T:
            y = HalfAttentionOnCPU.apply(qkv, dropout)
            return self.resid_dropout(self.c_proj(y))
        q, k, v = (t.transpose(1, 2) for t in qkv.unbind(2))  # each (B, H, T, head_size)
        if cache is not None:
            k, v = cache.append(k, v)
        y = F.scaled_dot_product_attention(
            q,
            k,
            v,
            # one query against a cache sees every key; SDPA's own causal mask would line it up with the first one
            attn_mask=None if T in (1, k.size(2)) else x.new_ones(T, k.size(2), dtype=torch.bool).tril(k.size(2) - T),
            is_causal=k.size(2) == T,
            dropout_p=dropout,
        )
        y = y.transpose(1, 2).reshape(B, T, -1)  # (B, T, C), or this rank's heads of C
        return self.resid_dropout(self.c_proj(y))


class MLP(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)
        self.dropout = Dropout(config.dropout)
        self.gelu = config.gelu

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.c_proj(F.gelu(self.c_fc(x), approximate=self.gelu)))


class Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cache: KVCache | None = None) -> Tensor:
        x = x + self.attn(self.ln_1(x), cache)  # (B, T, C)
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """
    A GPT-2 language model.

    Args:
        config: its shape.
        seed: initial weights are a function of (seed, parameter name, shape) alone, see `init_weights`; without one,
            of torch's seed, so that `torch.manual_seed(1337); GPT(config)` does what one expects.
    """

    def __init__(self, config: GPTConfig, seed: int | None = None) -> None:
        super().__init__()
        self.config = config
        with torch.random.fork_rng(devices=[]):  # torch's own initial weights, which are not wanted, draw from it
            self.transformer = nn.ModuleDict(
                dict(
                    # an Embedding's own draw would, on the meta device, import torch.compile for a second
                    wte=nn.Embedding.from_pretrained(torch.empty(config.vocab_size, config.n_embd), freeze=False),
                    wpe=nn.Embedding.from_pretrained(torch.empty(config.block_size, config.n_embd), freeze=False),
                    drop=Dropout(config.dropout),
                    h=nn.ModuleList(Block(config) for _ in range(config.n_layer)),
                    ln_f=nn.LayerNorm(config.n_embd, bias=config.bias),
                )
            )
            self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.tie_weights()
        if not self.lm_head.weight.is_meta:
            self.init_weights(torch.initial_seed() if seed is None else seed)

    def tie_weights(self) -> None:
        """One parameter for wte and lm_head: Press and Wolf 2017, arXiv:1608.05859. `to_empty` makes two of it."""
        self.lm_head.weight = self.transformer.wte.weight

    @torch.no_grad()
    def init_weights(self, seed: int, put: Callable[[Tensor, Tensor], object] = Tensor.copy_) -> None:
        """
        GPT-2's initial weights: normal with standard deviation 0.02, residual projections 0.02 / sqrt(2 n_layer),
        biases 0, LayerNorm 1. Each parameter has a generator of its own, seeded by (seed, name) and run on the CPU:
        the same numbers on every device, in whatever order, by whichever rank.

        Args:
            put: copies a whole tensor into a parameter, of which a rank may hold a shard.
        """
        self.tie_weights()
        for name, p in self.named_parameters():
            if p.dim() < 2:
                put(p, torch.full(p.shape, 0.0 if name.endswith("bias") else 1.0))
            else:
                std = 0.02 / math.sqrt(2 * self.config.n_layer) if name.endswith("c_proj.weight") else 0.02
                digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
                generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
                put(p, torch.empty(p.shape, dtype=torch.float32).normal_(0.0, std, generator=generator))

    def get_num_params(self, non_embedding: bool = True) -> int:
        """Number of parameters; without the position embeddings by default (wte counts: it is lm_head's weight)."""
        n = sum(p.numel() for p in self.parameters())
        return n - self.transformer.wpe.weight.numel() if non_embedding else n

    def forward(
        self,
        idx: Tensor,
        targets: Tensor | None = None,
        target_count: float | None = None,
        caches: list[KVCache] | None = None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """
        Logits and loss.

        Args:
            idx: token ids (B, T), T at most block_size (less what the caches hold).
            targets: token ids (B, T); -1 is ignored.
            target_count: for training: the loss is the sum over the targets divided by this, so that shares of a
                batch add up exactly, also where a share is empty; no logits are returned then, which for a large
                vocabulary need not exist all at once.
            caches: one KVCache a block; idx continues what they hold.

        Returns:
            (logits (B, T, V), mean loss) with targets, (None, sum / target_count) with target_count as well, and
            (logits of the last position (B, 1, V), None) without targets.
        """
        T = idx.size(1)
        start = caches[0].length if caches else 0
        if start + T > self.config.block_size:
            raise ValueError(f"a sequence of {start + T} tokens is longer than block_size {self.config.block_size}")
        positions = torch.arange(start, start + T, device=idx.device)  # (T,)
        x = self.transformer.wte(idx) + self.transformer.wpe(positions)  # (B, T, C)
        x = self.transformer.drop(x)
        for i, block in enumerate(self.transformer.h):
            x = block(x, caches[i] if caches else None)
        x = self.transformer.ln_f(x)

        if targets is None:
            return self.lm_head(x[:, -1:]), None
        if target_count is not None:
            return None, summed_loss(x, self.lm_head.weight, targets) / target_count
        logits = self.lm_head(x)  # (B, T, V)
        return logits, F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORE)

    def crop_block_size(self, block_size: int) -> None:
        """Shorten the context: drop the position embeddings from `block_size` on."""
        if not 1 <= block_size <= self.config.block_size:
            raise ValueError(f"block_size {block_size} is outside 1 to {self.config.block_size}, this model's own")
        self.config.block_size = block_size
        wpe = self.transformer.wpe
        wpe.weight = nn.Parameter(wpe.weight.detach()[:block_size].clone())
        wpe.num_embeddings = block_size

    @classmethod
    def from_pretrained(cls, model_type: str, override_args: dict | None = None) -> "GPT":
        """
        Weights from Hugging Face: 'gpt2', 'gpt2-medium', 'gpt2-large', 'gpt2-xl', or a folder that a GPT2LMHeadModel
        was saved to. Only dropout can be overridden.

        Raises:
            ValueError: the weights cannot be had, or are no GPT-2.
        """
        from transformers import GPT2LMHeadModel

        override_args = override_args or {}
        if set(override_args) - {"dropout"}:
            raise ValueError(f"only dropout can be overridden, not {sorted(override_args)}")
        try:
            hf, report = GPT2LMHeadModel.from_pretrained(model_type, output_loading_info=True)
        except Exception as e:  # transformers, safetensors and the network raise nearly anything
            raise ValueError(f"cannot load {model_type!r} with transformers: {(str(e).splitlines() or [e])[0]}") from e
        if report["missing_keys"]:  # transformers makes them up
            raise ValueError(f"{model_type!r} is no GPT-2: it lacks {min(report['missing_keys'])}, among others")
        return cls.from_hf(hf, **override_args)

    @classmethod
    def from_hf(cls, hf: nn.Module, dropout: float = 0.0) -> "GPT":
        """
        The same model as a transformers GPT2LMHeadModel, its weights copied.

        Raises:
            ValueError: it computes something else than a GPT-2 does.
        """
        c = hf.config
        gelus = {"gelu": "none", "gelu_python": "none"}
        gelus |= dict.fromkeys(("gelu_new", "gelu_fast", "gelu_pytorch_tanh", "gelu_accurate"), "tanh")
        ours = dict(layer_norm_epsilon=(1e-5,), scale_attn_weights=(True,), scale_attn_by_inverse_layer_idx=(False,))
        ours |= dict(activation_function=gelus, tie_word_embeddings=(True,), add_cross_attention=(False,))
        wrong = [f"{k}={getattr(c, k)}" for k, known in ours.items() if hasattr(c, k) and getattr(c, k) not in known]
        if wrong:
            raise ValueError(f"this GPT-2 is computed in another way than ours: {', '.join(wrong)}")
        shape = dict(n_layer=c.n_layer, n_head=c.n_head, n_embd=c.n_embd, gelu=gelus[c.activation_function])
        config = GPTConfig(block_size=c.n_positions, vocab_size=c.vocab_size, bias=True, dropout=dropout, **shape)
        # transformers keeps attention and MLP as Conv1D, whose weight is (in, out)
        conv = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
        return cls.from_state(config, {n: w.t() if n.endswith(conv) else w for n, w in hf.state_dict().items()})

    @classmethod
    def from_state(cls, config: GPTConfig, state: dict[str, Tensor]) -> "GPT":
        """
        A model with these weights, copied, in float32.

        Raises:
            ValueError: they are not those of such a model.
        """
        with torch.device("meta"):  # no memory and no time for initial weights that are not wanted
            model = cls(config)
        # ".attn.bias" is the causal mask that nanoGPT without flash attention stores; we have none
        copied = {n: w.detach().float().contiguous().clone() for n, w in state.items() if not n.endswith(".attn.bias")}
        try:
            model.load_state_dict(copied, assign=True)
        except RuntimeError as e:
            raise ValueError(" ".join(str(e).split())[:500]) from e
        model.tie_weights()
        return model

    def describe(self) -> dict:
        """The checkpoint's `model_args`: the config as a dict."""
        return asdict(self.config)

    def configure_optimizers(
        self, weight_decay: float, learning_rate: float, betas: tuple[float, float], device_type: str
    ) -> torch.optim.AdamW:
        """
        AdamW with two groups: parameters of two or more dimensions (matmuls, embeddings), which decay, and the rest
        (biases, LayerNorm), which do not. The fused kernel wherever the device has it: one pass over the memory.
        """
        params = [p for p in self.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in params if p.dim() >= 2], "weight_decay": weight_decay},
            {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, fused=device_type in ("cuda", "cpu", "mps"))

    def flops_per_token(self) -> float:
        """Floating-point operations for one token's forward and backward: 6 N + 12 L H Q T (PaLM, arXiv:2204.02311)."""
        c = self.config
        return 6 * self.get_num_params() + 12 * c.n_layer * c.n_embd * c.block_size

    def estimate_mfu(self, fwdbwd_per_iter: float, dt: float, peak_flops: float = 312e12) -> float:
        """
        Model FLOPs utilization, 0 to 1: `fwdbwd_per_iter` sequences of block_size tokens in `dt` seconds against
        `peak_flops` (an A100's bfloat16 unless told otherwise, as in nanoGPT; metrics.py knows the real device's).
        """
        return self.flops_per_token() * self.config.block_size * fwdbwd_per_iter / dt / peak_flops

    @torch.no_grad()
    def generate(
        self,
        idx: Tensor,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        n_tokens: int | None = None,
        use_cache: bool = True,
    ) -> Tensor:
        """
        Continue each row of `idx` (B, T) by `max_new_tokens` sampled tokens; returns (B, T + max_new_tokens).

        Keys and values are cached until the sequence outgrows block_size. From there on the window slides, which
        gives every token a new position and so invalidates the cache: each step is a full forward.

        Args:
            temperature: divides the logits; 0 takes the likeliest token.
            top_k: sample among the k likeliest only (None or 0: all).
            n_tokens: only ids below this are sampled: a padded vocabulary has ids that no tokenizer can decode.
            use_cache: False computes every position again for every token: slow, the same result.
        """
        caches = None
        if use_cache and idx.size(1) < self.config.block_size:
            w, c = self.transformer.wte.weight, self.config
            dtype = torch.get_autocast_dtype(w.device.type) if torch.is_autocast_enabled(w.device.type) else w.dtype
            empty = partial(torch.empty, idx.size(0), c.n_head, c.block_size, c.n_embd // c.n_head)
            caches = [KVCache(*(empty(dtype=dtype, device=w.device) for _ in "kv")) for _ in range(c.n_layer)]
        for _ in range(max_new_tokens):
            if caches is not None and idx.size(1) <= self.config.block_size:
                logits, _ = self(idx[:, caches[0].length :], caches=caches)
            else:
                logits, _ = self(idx[:, -self.config.block_size :])
            logits = logits[:, -1, :n_tokens].float()  # (B, V)
            if temperature == 0:
                following = logits.argmax(-1, keepdim=True)
            else:
                logits = logits / temperature
                if top_k:
                    least = logits.topk(min(top_k, logits.size(-1))).values[:, -1:]
                    logits = logits.masked_fill(logits < least, -math.inf)
                following = torch.multinomial(logits.softmax(-1), 1)
            idx = torch.cat((idx, following), dim=1)
        return idx


def logits_at_once(on_cpu: bool, itemsize: int) -> tuple[int, int, int]:
    """
    How many logits may exist at once: in float32 where they are not cut; in a chunk, of `itemsize` bytes each; and of
    a chunk in float32. On a CPU 64, 64 and 8 MiB, the last for its cache: a third less time than 64.
    """
    return (2**24, 2**26 // itemsize, 2**21) if on_cpu else (2**26, 2**26, 2**26)


def summed_loss(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """
    Cross-entropy of `x @ weight.T` summed over the targets that are not -1, a float32 scalar.

    Args:
        x: (B, T, C) final hidden states. weight: (V, C). targets: (B, T).
    """
    x, targets = x.flatten(0, 1), targets.flatten()
    whole, _, _ = logits_at_once(x.device.type == "cpu", x.itemsize)
    rows = max(1, whole // weight.size(0))
    if x.size(0) <= rows or not torch.is_grad_enabled():
        losses = [
            F.cross_entropy(F.linear(xs, weight).float(), ts, reduction="sum", ignore_index=IGNORE)
            for xs, ts in zip(x.split(rows), targets.split(rows), strict=True)
        ]
        return torch.stack(losses).sum()
    if torch.is_autocast_enabled(x.device.type):  # autocast does not reach into a Function
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight = x.to(dtype), weight.to(dtype)
    _, many, few = logits_at_once(x.device.type == "cpu", x.itemsize)
    return ChunkedLoss.apply(x, weight, targets, many, few)


class ChunkedLoss(torch.autograd.Function):
    """
    The same sum for a large vocabulary, in chunks of rows. The logits of a whole micro-batch would be the largest
    tensor of the step, several times over; the gradient of a chunk needs nothing of the others, so it is taken at
    once, in the place of the chunk's logits. F.linear_cross_entropy has the same aim, but was 4 to 8 times slower on a
    CPU and returned the sum rounded to bfloat16 (torch 2.13).
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, targets: Tensor, many: int, few: int) -> Tensor:  # noqa: ANN001
        V, C = weight.shape
        rows, few_rows, few_ids = max(1, many // V), max(1, few // V), max(1, few // C)
        loss = x.new_zeros((), dtype=torch.float32)
        dx, dw = torch.empty_like(x), torch.zeros_like(weight, dtype=torch.float32)
        chunk = x.new_empty(min(rows, len(x)), V)
        for xs, ts, dxs in zip(x.split(rows), targets.split(rows), dx.split(rows), strict=True):
            logits = torch.mm(xs, weight.t(), out=chunk[: len(xs)])  # (rows, V)
            for part, at in zip(logits.split(few_rows), ts.split(few_rows), strict=True):
                valid, at = at[:, None] != IGNORE, at[:, None].clamp(min=0)  # (few_rows, 1) each
                p = part.float()  # (few_rows, V)
                p -= p.amax(-1, keepdim=True)
                at_target = p.gather(1, at)
                total = p.exp_().sum(-1, keepdim=True)
                loss += ((total.log() - at_target) * valid).sum()
                # d loss / d logits = softmax - one_hot
                part.copy_(p.mul_(valid / total).scatter_add_(1, at, -valid.float()))
                del p  # its memory is the next one's
            torch.mm(logits, weight, out=dxs)
            for dws, part in zip(dw.split(few_ids), logits.split(few_ids, 1), strict=True):
                dws += part.t() @ xs
        ctx.save_for_backward(dx, dw)
        ctx.weight_dtype = weight.dtype
        return loss

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None, None, None]:  # noqa: ANN001
        dx, dw = ctx.saved_tensors
        # in float32: 1 / target_count rounded to bfloat16 would scale all gradients but those of lm_head by up to 0.4 %
        return (dx.float() * grad).to(dx.dtype), (dw * grad).to(ctx.weight_dtype), None, None, None
