"""
The GPT family: GPT-2 as in nanoGPT, nanochat and Llama; their initial weights and optimizer groups.

Names and shapes of GPT-2's parameters are nanoGPT's, so checkpoints are interchangeable. Linear weights are
(out, in), the query, key and value projections are stacked in `c_attn` in that order, and `transformer.wte`
and `lm_head` are tied. This module does not depend on torch.distributed: isogpt/parallel distributes the
model from outside. `Seams` lists the functions that it exchanges for this.
"""

import math
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from itertools import chain
from textwrap import shorten

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from isogpt.common.random_numbers import normal_numbers
from isogpt.nn import generation
from isogpt.nn.architecture import ARCHS, GPTConfig
from isogpt.nn.counts import count_model, flops_per_token
from isogpt.nn.experts import ExpertLinear, MoE, Router, unchanged
from isogpt.nn.kernels import (
    IGNORE,
    Dropout,
    KVCache,
    RMSNorm,
    causal_attention,
    compute_dtype,
    relu2,
    rotate,
    soft_cap,
    summed_loss,
)

# of a block: (B, T, C), and with experts also MoE.routing_of in training
BlockOutput = Tensor | tuple[Tensor, Tensor | None]
Prediction = tuple[Tensor | None, Tensor | None]  # logits and loss, see GPT.forward


def call(function: Callable, *args: object) -> object:
    """Call a function without anything around it."""
    return function(*args)


@dataclass(frozen=True)
class Seams:
    """
    The functions of the model that may be exchanged: `module.seams = replace(module.seams, loss=...)`, or for
    all modules isogpt.parallel.attach.replace_seams(model, loss=...). The defaults are for one process.
    """

    # (start, end, device=...) -> positions of the tokens that this process reads; context parallelism
    positions: Callable[..., Tensor] = torch.arange
    # kernels.causal_attention, the only function that mixes positions; context parallelism
    attention: Callable[..., Tensor] = causal_attention
    # kernels.summed_loss of the last block's output; tensor parallelism, torch.compile
    loss: Callable[..., Tensor] = summed_loss
    # (Block.compute, its arguments) -> what it returns; activation checkpointing, in some blocks
    block: Callable[..., BlockOutput] = call
    # (experts, rows sorted by expert, rows of each expert) -> rows; expert parallelism
    experts: Callable[..., Tensor] = call
    # this process's tokens per expert (B, E) -> those of the whole sequence; context parallelism
    tokens_per_expert: Callable[[Tensor], Tensor] = unchanged
    # generation.advance, which generates in steps of one shape, as a GPU always does; None: with caches that
    # grow; torch.compile
    advance: Callable[..., None] | None = None


# Initial values. The biases of these modules are 0; their weights are normal, see GPT.initial_std, or 1
NORMAL_WEIGHTS = (nn.Linear, nn.Embedding, ExpertLinear, Router)
UNIT_WEIGHTS = (nn.LayerNorm, nn.RMSNorm)
# a number, "normal", or a function of the config that returns the values
Rule = float | str | Callable[[GPTConfig], Tensor]
# of all other parameters and of buffers: {pattern of their names: rule}. What a module's __init__ writes is
# lost: models are made on the meta device
INITIAL_VALUES: dict[str, Rule] = {}


def initial_rule(model: nn.Module, name: str, tensor: Tensor) -> Rule:
    """
    Return how the values of a parameter or buffer of a model begin.

    Raises:
        ValueError: there is no rule, or `__init__` has given a Linear or a norm other values than PyTorch's.
    """
    for pattern, rule in INITIAL_VALUES.items():
        if re.fullmatch(pattern, name):
            return rule
    module = model.get_submodule(name.rpartition(".")[0])
    if isinstance(module, NORMAL_WEIGHTS + UNIT_WEIGHTS) and name.endswith((".weight", ".bias")):
        normal = "normal" if isinstance(module, NORMAL_WEIGHTS) else 1.0
        rule = 0.0 if name.endswith(".bias") else normal
        if tensor.is_meta or not isinstance(module, (nn.Linear, *UNIT_WEIGHTS)):
            return rule
        low, high = tensor.min().item(), tensor.max().item()
        is_constant = low == high != rule and tensor.numel() > 1
        bound = 1.001 * module.in_features**-0.5 if isinstance(module, nn.Linear) else math.inf
        if not is_constant and -bound <= low and high <= bound:
            return rule
    pattern = re.sub(r"\.\d+(?=\.)", r".\\d+", name).replace(".", r"\.")
    advice = f'write r"{pattern}": VALUE into INITIAL_VALUES in model.py'
    raise ValueError(f"__init__ sets {name}, but this is lost: {advice}")


def make_norm(config: GPTConfig) -> nn.Module:
    """The architecture's norm over n_embd features."""
    arch = ARCHS[config.arch]
    if arch.rms_norm:
        return RMSNorm(config.n_embd, config.norm_eps, elementwise_affine=arch.norm_weights)
    return nn.LayerNorm(config.n_embd, config.norm_eps, bias=config.bias)


class CausalSelfAttention(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.head_size = config.n_embd // config.n_head
        self.queries_per_key = config.n_head // config.n_kv_head
        self.c_attn = nn.Linear(config.n_embd, sum(config.qkv_rows), bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.resid_dropout = Dropout(config.dropout)
        self.dropout = config.dropout
        self.qk_eps = config.norm_eps if ARCHS[config.arch].qk_norm else None
        self.seams = Seams()

    def forward(self, x: Tensor, rope: Tensor | None = None, cache: KVCache | None = None) -> Tensor:
        B, T, _ = x.shape
        # -1: the heads of this rank, because tensor parallelism splits them over ranks
        qkv = self.c_attn(x).view(B, T, -1, self.head_size)  # (B, T, H + 2 K, D)
        K = qkv.size(2) // (self.queries_per_key + 2)
        H = K * self.queries_per_key
        if rope is None:
            q, k, v = qkv.split((H, K, K), dim=2)  # (B, T, H, D), (B, T, K, D) twice
        else:
            qk, v = qkv.split((H + K, K), dim=2)
            q, k = rotate(qk, rope, self.qk_eps).split((H, K), dim=2)
        y = self.seams.attention(q, k, v, self.dropout if self.training else 0.0, cache)  # (B, T, H * D)
        return self.resid_dropout(self.c_proj(y))  # (B, T, C)


class MLP(nn.Module):
    """The MLP of a block, or all experts of a block, whose layers `linear` makes."""

    def __init__(self, config: GPTConfig, linear: Callable[..., nn.Module] = nn.Linear) -> None:
        super().__init__()
        self.activation = ARCHS[config.arch].activation
        self.gelu = config.gelu
        if self.activation == "swiglu":
            self.c_gate = linear(config.n_embd, config.n_hidden, bias=config.bias)
        self.c_fc = linear(config.n_embd, config.n_hidden, bias=config.bias)
        self.c_proj = linear(config.n_hidden, config.n_embd, bias=config.bias)
        self.dropout = Dropout(config.dropout)

    def forward(self, x: Tensor, *counts: Tensor) -> Tensor:
        """(..., C) -> (..., C). Experts' rows are sorted by expert, with `counts` (E,) of each."""
        hidden = self.c_fc(x, *counts)  # (..., n_hidden)
        if self.activation == "swiglu":
            hidden = F.silu(self.c_gate(x, *counts)) * hidden
        elif self.activation == "relu2":
            hidden = relu2(hidden)
        else:
            hidden = F.gelu(hidden, approximate=self.gelu)
        return self.dropout(self.c_proj(hidden, *counts))


def make_mlp(config: GPTConfig) -> nn.Module:
    """A block's MLP, or with n_expert the block's router and experts."""
    if not config.n_expert:
        return MLP(config)
    experts = MLP(replace(config, dropout=0.0), partial(ExpertLinear, config.n_expert))
    return MoE(config, experts, Seams())


class Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.ln_1 = make_norm(config)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = make_norm(config)
        self.mlp = make_mlp(config)
        self.has_experts = config.n_expert > 0
        self.seams = Seams()

    def forward(self, x: Tensor, rope: Tensor | None = None, cache: KVCache | None = None) -> BlockOutput:
        """Apply the block: (B, T, C) -> (B, T, C), and with experts also MoE.routing_of, (B, E + 2)."""
        return self.seams.block(self.compute, x, rope, cache)

    def compute(self, x: Tensor, rope: Tensor | None, cache: KVCache | None) -> BlockOutput:
        """`forward` itself, which activation checkpointing runs again in the backward pass."""
        x = x + self.attn(self.ln_1(x), rope, cache)
        if not self.has_experts:
            return x + self.mlp(self.ln_2(x))
        y, routing = self.mlp(self.ln_2(x))
        return x + y, routing


class GPT(nn.Module):
    """
    A language model of one of the architectures in ARCHS.

    Args:
        config: the architecture.
        seed: seed of the initial weights, see `init_weights`. Default: torch's seed, so that
            `torch.manual_seed(1337)` before `GPT(config)` has the usual effect.
    """

    config_class = GPTConfig  # what checkpoints and plans build, so that it may be extended above

    def __init__(self, config: GPTConfig, seed: int | None = None) -> None:
        super().__init__()
        self.config = config
        self.arch = ARCHS[config.arch]
        # Embedding's initialization on the meta device would import torch.compile, which takes 1 to 2 seconds
        wte = nn.Embedding.from_pretrained(torch.empty(config.vocab_size, config.n_embd), freeze=False)
        with torch.random.fork_rng(devices=[]):  # Linear draws initial weights, which init_weights overwrites
            self.transformer = nn.ModuleDict({"wte": wte})
            if not self.arch.rotation:
                wpe = torch.empty(config.block_size, config.n_embd)
                self.transformer["wpe"] = nn.Embedding.from_pretrained(wpe, freeze=False)
            if self.arch.norm_embeddings:
                self.transformer["ln_0"] = make_norm(config)
            self.transformer["drop"] = Dropout(config.dropout)
            self.transformer["h"] = nn.ModuleList(Block(config) for _ in range(config.n_layer))
            self.transformer["ln_f"] = make_norm(config)
            self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.seams = Seams()
        self.step = 0  # of the training run, see `set_step`
        self.routing: Tensor | None = None  # sums of MoE.routing_of since `reset_routing`, (L, E + 2)
        parameters = self.named_parameters(remove_duplicate=False)
        tensors = chain(parameters, self.named_buffers(remove_duplicate=False))
        self.initial_rules = {name: initial_rule(self, name, t) for name, t in tensors}
        self.tie_weights()
        if not self.lm_head.weight.is_meta:
            self.init_weights(torch.initial_seed() if seed is None else seed)

    def tie_weights(self) -> None:
        """
        Share one parameter between wte and lm_head (Press and Wolf 2017, arXiv:1608.05859) if the config says
        so; `to_empty` unties it.
        """
        if self.config.tied and "wte" in self.transformer:  # some pipeline stages contain neither
            self.lm_head.weight = self.transformer.wte.weight

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Set all parameters and buffers to their initial values, see `initial_weight`."""
        self.tie_weights()
        for name, tensor in chain(self.named_parameters(), self.named_buffers()):
            tensor.copy_(self.initial_weight(name, tensor.shape, seed))

    def initial_weight(
        self, name: str, shape: torch.Size, seed: int, part: Sequence[slice] | None = None
    ) -> Tensor:
        """
        Return the initial values of a parameter or buffer, as `initial_rule` says. Normal values have the
        standard deviation of `initial_std`, and are drawn on the CPU: each number depends on (seed, name) and
        its place in the parameter, and neither on the device nor on how parameters are distributed.

        Args:
            shape: of the whole parameter.
            part: what to return of it, a slice with start and stop for each dimension; only these numbers are
                drawn. Default: all.
        """
        part = [slice(0, size) for size in shape] if part is None else part
        rule = self.initial_rules[name]
        if callable(rule):
            values = rule(self.config)
            if not torch.is_tensor(values) or values.shape != shape:
                raise ValueError(f"INITIAL_VALUES: {name} needs a tensor of shape {tuple(shape)}")
            return values[tuple(part)]
        value = self.initial_std(name) if rule == "normal" else float(rule)
        if rule == "normal" and value > 0:
            return torch.from_numpy(normal_numbers(seed, name, shape, part)).mul_(value)
        return torch.full([place.stop - place.start for place in part], value)

    def fill_buffers(self, device: torch.device) -> None:
        """Allocate the buffers of a model from the meta device, with their initial values."""
        for name, buffer in list(self.named_buffers()):
            path, _, last = name.rpartition(".")
            values = self.initial_weight(name, buffer.shape, seed=0)
            setattr(self.get_submodule(path), last, values.to(device, buffer.dtype))

    def initial_std(self, name: str) -> float:
        """
        Return the standard deviation of a matrix's initial weights.

        For gpt2 and llama it is 0.02, divided by sqrt(2 n_layer) in residual projections, as in GPT-2. For
        nanochat, projections into the residual stream start at 0, so that each block starts as the identity.
        The head starts near 0, and the embeddings, which are normalized, at 1.
        """
        c, is_projection = self.config, name.endswith("c_proj.weight")
        if c.arch != "nanochat":
            return 0.02 / math.sqrt(2 * c.n_layer) if is_projection else 0.02
        if is_projection:
            return 0.0
        special = {"transformer.wte.weight": 1.0, "lm_head.weight": 0.001}
        return special.get(name, c.n_embd**-0.5)

    def set_step(self, step: int) -> None:
        """
        Tell all modules that have an attribute `step` (`self.step = 0` in __init__) the number of the
        training step. A run calls this before each step and evaluation; with weights of a checkpoint, the
        step is the checkpoint's.
        """
        for module in self.modules_with_step:
            vars(module)["step"] = step  # in a third of the time of Module.__setattr__

    @cached_property
    def modules_with_step(self) -> list[nn.Module]:
        """
        The modules that `set_step` tells the step, listed once: to look for them takes 0.2 ms.

        Raises:
            ValueError: a module's `step` means something else.
        """
        modules = [module for module in self.modules() if "step" in vars(module)]
        for module in modules:
            if module.step != 0:
                name = type(module).__name__
                raise ValueError(f"{name}.step is {module.step!r}, but train.py sets it: use another name")
        return modules

    def get_num_params(self, non_embedding: bool = True) -> int:
        """
        Return the number of parameters, by default without the position embeddings (wte counts, because
        lm_head uses it).
        """
        n = sum(p.numel() for p in self.parameters())
        if non_embedding and "wpe" in self.transformer:
            n -= self.transformer.wpe.weight.numel()
        return n

    def forward(
        self,
        idx: Tensor,
        targets: Tensor | None = None,
        target_count: float | None = None,
        positions: Tensor | None = None,
        caches: list[KVCache] | None = None,
        with_logits: bool = False,
    ) -> Prediction:
        """
        Compute logits and loss.

        Args:
            idx: token ids (B, T).
            targets: token ids (B, T); -1 is ignored.
            target_count: divide the summed loss by this number instead of averaging it, so that the losses of
                a batch's parts add up exactly. Logits are not returned, unless with_logits is set: for a
                large vocabulary, they are never all in memory.
            positions: positions of the tokens (T,). Default: 0 to T - 1, or the positions that follow the
                caches.
            caches: one KVCache per block, to which these tokens' keys and values are appended. With rotary
                positions, single tokens can follow past block_size: the oldest position is overwritten.

        Returns:
            (logits of the last position (B, 1, V), None) without targets; (logits (B, T, V), mean loss) with
            targets; (None, summed loss / target_count) with targets and target_count, or with_logits (logits
            (B, T, V), the same loss).

        Raises:
            ValueError: the sequence, including what the caches hold, is longer than block_size.
        """
        if positions is None:
            positions = self.next_positions(idx, caches)
        x = self.embed(idx, positions)
        x, routing = self.run_blocks(enumerate(self.transformer.h), x, positions, caches)
        return self.predict(x, routing, targets, target_count, with_logits)

    def next_positions(self, idx: Tensor, caches: list[KVCache] | None) -> Tensor:
        """Positions (T,) of token ids (B, T) that follow the caches, see `forward`."""
        start = caches[0].length if caches else 0
        end, longest = start + idx.size(1), self.config.block_size
        if end > longest and not (self.arch.rotation and caches and idx.size(1) == 1):
            raise ValueError(f"a sequence of {end} tokens is longer than block_size {longest}")
        return self.seams.positions(start, end, device=idx.device)

    def embed(self, idx: Tensor, positions: Tensor) -> Tensor:
        """The input of the first block: (B, T) -> (B, T, C)."""
        x = self.transformer.wte(idx)
        if not self.arch.rotation:
            x = x + self.transformer.wpe(positions)
        if self.arch.norm_embeddings:
            # the residual stream stays in float32, also under autocast
            x = self.transformer.ln_0(x).to(x.dtype)
        if self.config.residual_dtype == "bfloat16" and compute_dtype(x) == torch.bfloat16:
            x = x.bfloat16()  # half the memory traffic between the blocks, whose sums are then rounded
        return self.transformer.drop(x)

    def run_blocks(
        self,
        blocks: Iterable[tuple[int | str, nn.Module]],
        x: Tensor,
        positions: Tensor,
        caches: list[KVCache] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """
        Apply blocks, given with their numbers: (B, T, C) -> (B, T, C), and what MoE.routing_of returns for
        each block.
        """
        rope = self.rotary_angles(positions) if self.arch.rotation else None  # (2, T, 1, D)
        routings = []
        for number, block in blocks:
            x = block(x, rope, caches[int(number)] if caches else None)
            if self.config.n_expert:
                x, routing = x
                routings.append(routing)
        return x, torch.stack(routings) if routings and self.training else None  # (blocks, B, E + 2)

    def predict(
        self,
        x: Tensor,
        routing: Tensor | None,
        targets: Tensor | None,
        target_count: float | None,
        with_logits: bool = False,
    ) -> Prediction:
        """Logits and loss from the last block's output, see `forward`."""
        logits, loss = self.predict_tokens(x, targets, target_count, with_logits)
        if routing is None or targets is None:
            return logits, loss
        valid = targets != IGNORE  # (B, T)
        routing = routing * valid.any(1)[:, None]  # without padding rows
        with torch.no_grad():
            sums = routing.sum(1)
            self.routing = sums if self.routing is None else self.routing + sums
        auxiliary = routing[..., 0].sum() / (valid.sum() if target_count is None else target_count)
        # the value is the tokens' loss alone, but the gradient includes the auxiliary losses
        return logits, loss + (auxiliary - auxiliary.detach())

    def predict_tokens(
        self, x: Tensor, targets: Tensor | None, target_count: float | None, with_logits: bool = False
    ) -> Prediction:
        """`predict` without the router's auxiliary losses."""
        x = self.transformer.ln_f(x)
        if targets is None:
            return soft_cap(self.lm_head(x[:, -1:]), self.arch.softcap), None
        with_logits = with_logits or target_count is None  # in training, the loss does not need them
        logits = soft_cap(self.lm_head(x), self.arch.softcap) if with_logits else None  # (B, T, V)
        count = (targets != IGNORE).sum() if target_count is None else target_count
        return logits, self.seams.loss(x, self.lm_head.weight, targets, self.arch.softcap) / count

    def reset_routing(self, device: torch.device) -> None:
        """
        Reset the routers' sums to 0: a tensor, because torch.compile would compile one graph for None and one
        for a tensor.
        """
        c = self.config
        if c.n_expert:
            self.routing = torch.zeros(c.n_layer, c.n_expert + 2, device=device)

    def rotary_angles(self, positions: Tensor) -> Tensor:
        """
        Cosine and signed sine of the rotary positions' angles, equal in every head: (T,) -> (2, T, 1, D).
        """
        c = self.config
        D = c.n_embd // c.n_head
        exponents = torch.arange(0, D, 2, device=positions.device) / D  # (D / 2,)
        angles = positions[:, None, None] * (1.0 / c.rope_theta**exponents)  # (T, 1, D / 2)
        cos, sin = angles.cos(), self.arch.rotation * angles.sin()
        return torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)))

    def crop_block_size(self, block_size: int) -> None:
        """Shorten the context: remove the position embeddings from `block_size` on."""
        if not 1 <= block_size <= self.config.block_size:
            raise ValueError(f"block_size {block_size} is outside 1 to {self.config.block_size}")
        self.config.block_size = block_size
        if "wpe" in self.transformer:
            wpe = self.transformer.wpe
            wpe.weight = nn.Parameter(wpe.weight.detach()[:block_size].clone())
            wpe.num_embeddings = block_size

    @classmethod
    def from_pretrained(cls, model_type: str, override_args: dict | None = None) -> "GPT":
        """
        Load weights with transformers.

        Args:
            model_type: 'gpt2', 'gpt2-medium', 'gpt2-large', 'gpt2-xl', or a folder with a saved
                GPT2LMHeadModel, NanoChatForCausalLM, LlamaForCausalLM or MixtralForCausalLM.
            override_args: only `dropout` can be overridden.

        Raises:
            ValueError: the weights cannot be loaded, or the model uses settings that this implementation does
                not support.
        """
        from isogpt.checkpoint import huggingface

        changes = override_args or {}
        if changes.keys() - {"dropout"}:
            raise ValueError(f"only dropout can be overridden, not {sorted(changes)}")
        args, weights = huggingface.load(model_type)
        return cls.from_state(cls.config_class(**args | changes), weights)

    @classmethod
    def from_state(cls, config: GPTConfig, state: dict[str, Tensor]) -> "GPT":
        """
        Build a float32 model with a copy of these weights.

        Raises:
            ValueError: names or shapes differ from the model's.
        """
        with torch.device("meta"):  # no memory or time for initial weights
            model = cls(config)
        copied = {name: w.detach().float().contiguous().clone() for name, w in state.items()}
        # the causal masks that nanoGPT stores if it runs without flash attention
        weights = {name: w for name, w in copied.items() if not name.endswith(".attn.bias")}
        try:
            model.load_state_dict(weights, assign=True)
        except RuntimeError as e:
            raise ValueError(shorten(str(e), 500)) from e
        model.tie_weights()
        model.fill_buffers(torch.device("cpu"))
        return model

    def describe(self) -> dict:
        """The `model_args` of a checkpoint: the config as a dict."""
        return asdict(self.config)

    def configure_optimizers(
        self, weight_decay: float, learning_rate: float, betas: tuple[float, float], device_type: str
    ) -> torch.optim.AdamW:
        """
        Make an AdamW with two groups: parameters with two or more dimensions (matmuls, embeddings) with
        weight decay, and all other parameters without. AdamW is fused (one pass over the memory) if the
        device supports this. This is nanoGPT's interface: train.py makes optimizers by RULES in
        isogpt/training/optim.py.
        """
        params = [p for p in self.parameters() if p.requires_grad]
        matrices = {"params": [p for p in params if p.dim() >= 2], "weight_decay": weight_decay}
        others = {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0}
        is_fused = device_type in ("cuda", "cpu", "mps")
        return torch.optim.AdamW([matrices, others], lr=learning_rate, betas=betas, fused=is_fused)

    def flops_per_token(self) -> float:
        """
        Return the FLOPs of one token's forward and backward pass, see isogpt/nn/counts.py: parameters are
        counted, and attention's FLOPs are a formula.
        """
        return flops_per_token(count_model(self), self.config)

    def estimate_mfu(self, fwdbwd_per_iter: float, dt: float, peak_flops: float = 312e12) -> float:
        """
        Return the model FLOPs utilization, from 0 to 1.

        Args:
            fwdbwd_per_iter: sequences of block_size tokens per iteration.
            dt: seconds per iteration.
            peak_flops: the device's peak FLOP/s; the default is the A100's peak in bfloat16, as in nanoGPT.
        """
        tokens = self.config.block_size * fwdbwd_per_iter
        return self.flops_per_token() * tokens / dt / peak_flops

    def generate(  # noqa: PLR0913  (nanoGPT's, and sample.py's settings)
        self,
        idx: Tensor,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        *,
        top_p: float | None = None,
        vocab_size: int | None = None,
        use_cache: bool = True,
        seed: int | None = None,
        first_sample: int = 0,
    ) -> Tensor:
        """
        Append `max_new_tokens` sampled tokens to each row of `idx` (B, T); returns (B, T + max_new_tokens).

        Only the last block_size tokens of a prompt are used. Keys and values are cached. Past block_size,
        models with rotary positions attend to the last block_size positions, and each token still takes one
        step. GPT-2's position embeddings end at block_size: each further token takes a forward pass over the
        last block_size tokens. If the model computes something else with the cache than without it, the cache
        is not used, with a note, see generation.problem_of_cache.

        The random numbers of row i depend on (seed, first_sample + i) alone, so a sample's text does not
        depend on the batch, except through rounding: the order of the sums in a matmul can vary with the
        number of rows.

        Args:
            temperature: divides the logits; 0 selects the most likely token.
            top_k: sample only from the k most likely tokens. None or 0: from all.
            top_p: sample only from the most likely tokens whose probabilities add up to this. None or 1: from
                all.
            vocab_size: sample only ids below this number. A padded vocabulary contains ids that the tokenizer
                cannot decode.
            use_cache: False recomputes the last block_size positions for each token: slower. Up to
                block_size, and in models without rotary positions beyond it, the result is the same.
            seed: seed of the samples. Default: drawn from torch's generator.
            first_sample: number of the first row's sample.
        """
        choice = generation.Choice(temperature, top_k, top_p, vocab_size)
        if use_cache and (problem := generation.problem_of_cache(self, idx, max_new_tokens)):
            print(f"note: {problem}", file=sys.stderr)
            use_cache = False
        return generation.generate(self, idx, max_new_tokens, choice, use_cache, seed, first_sample)
