"""
GPT-2: the model, its optimizer groups, text generation, and GPT-2 weights from Hugging Face.

Parameter names and shapes are nanoGPT's, so checkpoints are interchangeable: Linear weights are (out, in), the query,
key and value projections are stacked in `c_attn` in that order, and `transformer.wte` and `lm_head` are tied. Nothing
here depends on torch.distributed: isogpt/parallel distributes the model from outside.
"""

import hashlib
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from isogpt.kernels import IGNORE, Dropout, KVCache, causal_attention, summed_loss


@dataclass
class GPTConfig:
    """
    A model's architecture.

    Args:
        bias: use biases in Linear and LayerNorm, as GPT-2 does; False is slightly faster.
        gelu: 'none' (the exact GELU, as in nanoGPT) or 'tanh' (the approximation that GPT-2 was trained with).
    """

    block_size: int = 1024
    vocab_size: int = 50304  # GPT-2's 50257, padded to a multiple of 64 for faster matmuls
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    dropout: float = 0.0
    bias: bool = True
    gelu: str = "none"

    def __post_init__(self) -> None:
        for name in ("block_size", "vocab_size", "n_layer", "n_head", "n_embd"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be at least 1")
        if self.n_embd % self.n_head:
            raise ValueError(f"n_embd {self.n_embd} is not a multiple of n_head {self.n_head}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout is {self.dropout}: it must be in [0, 1)")


class CausalSelfAttention(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.head_size = config.n_embd // config.n_head
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.resid_dropout = Dropout(config.dropout)
        self.dropout = config.dropout
        self.attention = causal_attention  # the only call that mixes positions; context parallelism replaces it

    def forward(self, x: Tensor, cache: KVCache | None = None) -> Tensor:
        B, T, _ = x.shape
        # -1: the heads of this rank, because tensor parallelism splits them over ranks
        q, k, v = self.c_attn(x).view(B, T, 3, -1, self.head_size).unbind(2)  # (B, T, H, D) each
        y = self.attention(q, k, v, self.dropout if self.training else 0.0, cache)  # (B, T, H * D)
        return self.resid_dropout(self.c_proj(y))  # (B, T, C)


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
        config: the architecture.
        seed: of the initial weights, see `init_weights`. Default: torch's seed, so that `torch.manual_seed(1337)`
            before `GPT(config)` has the usual effect.
    """

    def __init__(self, config: GPTConfig, seed: int | None = None) -> None:
        super().__init__()
        self.config = config
        # Embedding's own initialization would import torch.compile on the meta device, which takes a second or two
        wte = nn.Embedding.from_pretrained(torch.empty(config.vocab_size, config.n_embd), freeze=False)
        wpe = nn.Embedding.from_pretrained(torch.empty(config.block_size, config.n_embd), freeze=False)
        with torch.random.fork_rng(devices=[]):  # Linear draws initial weights, which init_weights overwrites
            self.transformer = nn.ModuleDict(dict(
                wte=wte, wpe=wpe, drop=Dropout(config.dropout),
                h=nn.ModuleList(Block(config) for _ in range(config.n_layer)),
                ln_f=nn.LayerNorm(config.n_embd, bias=config.bias),
            ))  # fmt: skip
            self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.tie_weights()
        if not self.lm_head.weight.is_meta:
            self.init_weights(torch.initial_seed() if seed is None else seed)

    def tie_weights(self) -> None:
        """Share one parameter between wte and lm_head (Press and Wolf 2017, arXiv:1608.05859); `to_empty` unties it."""
        self.lm_head.weight = self.transformer.wte.weight

    @torch.no_grad()
    def init_weights(self, seed: int, put: Callable[[Tensor, Tensor], object] = Tensor.copy_) -> None:
        """
        GPT-2's initial weights: normal with standard deviation 0.02, or 0.02 / sqrt(2 n_layer) in residual projections;
        biases 0, LayerNorm weights 1. Each parameter is drawn on the CPU from its own generator, seeded with
        (seed, name), so the values depend neither on the device nor on how parameters are distributed over ranks.

        Args:
            seed: of all parameters.
            put: `put(parameter, values)` copies the full tensor `values` into a parameter, which may be sharded.
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
        """Number of parameters, by default without the position embeddings (wte counts, because lm_head uses it)."""
        n = sum(p.numel() for p in self.parameters())
        return n - self.transformer.wpe.weight.numel() if non_embedding else n

    def forward(
        self, idx: Tensor, targets: Tensor | None = None, target_count: float | None = None,
        positions: Tensor | None = None, caches: list[KVCache] | None = None,
    ) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
        """
        Compute logits and loss.

        Args:
            idx: token ids (B, T).
            targets: token ids (B, T); -1 is ignored.
            target_count: divide the summed loss by this number instead of averaging it, so that the losses of a
                batch's parts add up exactly. No logits are returned: for a large vocabulary they are never all in
                memory.
            positions: positions of the tokens (T,). Default: 0 to T - 1, or the positions that follow the caches.
            caches: one KVCache per block, to which these tokens' keys and values are appended.

        Returns:
            (logits of the last position (B, 1, V), None) without targets;
            (logits (B, T, V), mean loss) with targets;
            (None, summed loss / target_count) with targets and target_count.

        Raises:
            ValueError: the sequence, including what the caches hold, is longer than block_size.
        """
        T = idx.size(1)
        start = caches[0].length if caches else 0
        if start + T > self.config.block_size:
            raise ValueError(f"a sequence of {start + T} tokens is longer than block_size {self.config.block_size}")
        if positions is None:
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
        """Shorten the context: remove the position embeddings from `block_size` on."""
        if not 1 <= block_size <= self.config.block_size:
            raise ValueError(f"block_size {block_size} is outside 1 to {self.config.block_size}, the context length")
        self.config.block_size = block_size
        wpe = self.transformer.wpe
        wpe.weight = nn.Parameter(wpe.weight.detach()[:block_size].clone())
        wpe.num_embeddings = block_size

    @classmethod
    def from_pretrained(cls, model_type: str, override_args: dict | None = None) -> "GPT":
        """
        Load GPT-2 weights with transformers.

        Args:
            model_type: 'gpt2', 'gpt2-medium', 'gpt2-large', 'gpt2-xl', or a folder with a saved GPT2LMHeadModel.
            override_args: only `dropout` can be overridden.

        Raises:
            ValueError: the weights cannot be loaded, or are not a GPT-2's.
        """
        from transformers import GPT2LMHeadModel

        if set(override_args or {}) - {"dropout"}:
            raise ValueError(f"only dropout can be overridden, not {sorted(override_args)}")
        try:
            hf, report = GPT2LMHeadModel.from_pretrained(model_type, output_loading_info=True)
        except Exception as e:  # transformers, safetensors and the network raise many types
            raise ValueError(f"cannot load {model_type!r} with transformers: {(str(e).splitlines() or [e])[0]}") from e
        if report["missing_keys"]:  # transformers initializes them randomly
            raise ValueError(f"{model_type!r} is not a GPT-2: {min(report['missing_keys'])} is missing")
        return cls.from_hf(hf, **override_args or {})

    @classmethod
    def from_hf(cls, hf: nn.Module, dropout: float = 0.0) -> "GPT":
        """
        Convert a transformers GPT2LMHeadModel; the weights are copied.

        Raises:
            ValueError: the model has settings that this implementation does not support.
        """
        c = hf.config
        gelus = {"gelu": "none", "gelu_python": "none"}
        gelus |= dict.fromkeys(("gelu_new", "gelu_fast", "gelu_pytorch_tanh", "gelu_accurate"), "tanh")
        supported = {
            "activation_function": gelus, "layer_norm_epsilon": [1e-5], "scale_attn_weights": [True],
            "scale_attn_by_inverse_layer_idx": [False], "tie_word_embeddings": [True], "add_cross_attention": [False],
        }  # fmt: skip
        found = {name: getattr(c, name) for name in supported if hasattr(c, name)}
        unsupported = [f"{name}={value}" for name, value in found.items() if value not in supported[name]]
        if unsupported:
            raise ValueError(f"this GPT-2 has settings that are not supported: {', '.join(unsupported)}")
        config = GPTConfig(c.n_positions, c.vocab_size, c.n_layer, c.n_head, c.n_embd, dropout,
                           gelu=gelus[c.activation_function])  # fmt: skip
        # transformers implements attention and MLP with Conv1D, whose weights are (in, out)
        conv1d = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
        return cls.from_state(config, {n: w.t() if n.endswith(conv1d) else w for n, w in hf.state_dict().items()})

    @classmethod
    def from_state(cls, config: GPTConfig, state: dict[str, Tensor]) -> "GPT":
        """
        Build a float32 model with a copy of these weights.

        Raises:
            ValueError: names or shapes differ from the model's.
        """
        with torch.device("meta"):  # no memory or time for initial weights
            model = cls(config)
        # ".attn.bias" is the causal mask that nanoGPT stores if it runs without flash attention
        copied = {n: w.detach().float().contiguous().clone() for n, w in state.items() if not n.endswith(".attn.bias")}
        try:
            model.load_state_dict(copied, assign=True)
        except RuntimeError as e:
            raise ValueError(" ".join(str(e).split())[:500]) from e
        model.tie_weights()
        return model

    def describe(self) -> dict:
        """The `model_args` of a checkpoint: the config as a dict."""
        return asdict(self.config)

    def configure_optimizers(self, weight_decay: float, learning_rate: float, betas: tuple[float, float],
                             device_type: str) -> torch.optim.AdamW:  # fmt: skip
        """
        AdamW with two groups: parameters with two or more dimensions (matmuls, embeddings), with weight decay, and the
        others (biases, LayerNorm), without. It is fused, one pass over the memory, if the device supports that.
        """
        params = [p for p in self.parameters() if p.requires_grad]
        decay, no_decay = [p for p in params if p.dim() >= 2], [p for p in params if p.dim() < 2]
        groups = [{"params": decay, "weight_decay": weight_decay}, {"params": no_decay, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, fused=device_type in ("cuda", "cpu", "mps"))

    def flops_per_token(self) -> float:
        """FLOPs of one token's forward and backward: 6 N + 12 L H Q T (PaLM, appendix B, arXiv:2204.02311)."""
        c = self.config
        return 6 * self.get_num_params() + 12 * c.n_layer * c.n_embd * c.block_size

    def estimate_mfu(self, fwdbwd_per_iter: float, dt: float, peak_flops: float = 312e12) -> float:
        """
        Model FLOPs utilization, from 0 to 1.

        Args:
            fwdbwd_per_iter: sequences of block_size tokens per iteration.
            dt: seconds per iteration.
            peak_flops: the device's peak in FLOP/s; the default is an A100's in bfloat16, as in nanoGPT.
        """
        return self.flops_per_token() * self.config.block_size * fwdbwd_per_iter / dt / peak_flops

    @torch.no_grad()
    def generate(
        self, idx: Tensor, max_new_tokens: int, temperature: float = 1.0, top_k: int | None = None, *,
        top_p: float | None = None, vocab_size: int | None = None, use_cache: bool = True,
    ) -> Tensor:  # fmt: skip
        """
        Append `max_new_tokens` sampled tokens to each row of `idx` (B, T); returns (B, T + max_new_tokens).

        Keys and values are cached until the sequence exceeds block_size. Then the window slides: each token gets a new
        position, which invalidates the cache, so every further token takes a full forward pass.

        Args:
            temperature: divides the logits; 0 selects the most likely token.
            top_k: sample only from the k most likely tokens. None or 0: from all.
            top_p: sample only from the most likely tokens whose probabilities add up to this. None or 1: from all.
            vocab_size: sample only ids below this. A padded vocabulary has ids that the tokenizer cannot decode.
            use_cache: False recomputes all positions for each token: slower, with the same result.
        """
        block_size = self.config.block_size
        caches = self.empty_caches(idx.size(0)) if use_cache and idx.size(1) < block_size else None
        for _ in range(max_new_tokens):
            if caches is not None and idx.size(1) <= block_size:
                logits, _ = self(idx[:, caches[0].length :], caches=caches)
            else:
                logits, _ = self(idx[:, -block_size:])
            logits = logits[:, -1, :vocab_size].float()  # (B, V)
            idx = torch.cat((idx, next_token(logits, temperature, top_k, top_p)), dim=1)
        return idx

    def empty_caches(self, batch_size: int) -> list[KVCache]:
        """One empty key/value cache per block, with room for block_size positions, in the dtype of the forward pass."""
        c, w = self.config, self.transformer.wte.weight
        dtype = torch.get_autocast_dtype(w.device.type) if torch.is_autocast_enabled(w.device.type) else w.dtype
        shape = (c.n_layer, 2, batch_size, c.n_head, c.block_size, c.n_embd // c.n_head)
        return [KVCache(k, v) for k, v in torch.empty(shape, dtype=dtype, device=w.device)]


def next_token(logits: Tensor, temperature: float, top_k: int | None = None, top_p: float | None = None) -> Tensor:
    """
    Sample one token id per row of logits: (B, V) -> (B, 1). top_k is applied before top_p, which is nucleus sampling
    (Holtzman et al. 2019, arXiv:1904.09751).
    """
    if temperature < 1e-30:  # dividing by less would overflow
        return logits.argmax(-1, keepdim=True)
    logits = logits / temperature
    if top_k:
        smallest = logits.topk(min(top_k, logits.size(-1))).values[:, -1:]  # (B, 1)
        logits = logits.masked_fill(logits < smallest, -math.inf)
    probs = logits.softmax(-1)
    if top_p is None or top_p >= 1:
        return torch.multinomial(probs, 1)
    probs, ids = probs.sort(-1, descending=True)
    excluded = probs.cumsum(-1) - probs >= top_p  # the more likely tokens already add up to top_p
    excluded[:, 0] = False
    return ids.gather(1, torch.multinomial(probs.masked_fill(excluded, 0), 1))
