"""The architectures of the GPT family, and the shape of a model."""

import math
import reprlib
from dataclasses import dataclass, fields
from types import SimpleNamespace


@dataclass(frozen=True)
class Arch:
    """What distinguishes the architectures. The defaults are GPT-2's."""

    rms_norm: bool = False  # RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467) instead of LayerNorm
    norm_weights: bool = True  # norms contain weights
    norm_eps: float = 1e-5
    # direction of rotary positions (Su et al. 2021, arXiv:2104.09864), 1 or -1; 0: position embeddings
    rotation: int = 0
    qk_norm: bool = False  # RMSNorm of the rotated queries and keys (Henry et al. 2020, arXiv:2010.04245)
    norm_embeddings: bool = False  # a norm between the embeddings and the first block
    # gelu, relu2 (So et al. 2021, arXiv:2109.08668) or swiglu (Shazeer 2020, arXiv:2002.05202)
    activation: str = "gelu"
    softcap: float = 0.0  # logits become softcap * tanh(logits / softcap) (Gemma 2, arXiv:2408.00118)
    tied: bool = True  # whether wte and lm_head share their weights, if the config does not say


ARCHS = {
    "gpt2": Arch(),
    "nanochat": Arch(
        rms_norm=True,
        norm_weights=False,
        norm_eps=1e-6,
        rotation=-1,
        qk_norm=True,
        norm_embeddings=True,
        activation="relu2",
        softcap=15.0,
        tied=False,
    ),
    "llama": Arch(rms_norm=True, rotation=1, activation="swiglu", tied=False),
}
# the shapes of GPT-2, by values of init_from (Radford et al. 2019, table 2; the numbers of heads are from the
# models' config.json)
GPT2 = {
    "gpt2": {"n_layer": 12, "n_head": 12, "n_embd": 768},
    "gpt2-medium": {"n_layer": 24, "n_head": 16, "n_embd": 1024},
    "gpt2-large": {"n_layer": 36, "n_head": 20, "n_embd": 1280},
    "gpt2-xl": {"n_layer": 48, "n_head": 25, "n_embd": 1600},
}
# the smallest and the largest values of fields, also for models that are made without train.py, which checks
# its settings. Beyond them, building a model takes minutes or a matrix has no size in bytes
LIMITS = {"n_layer": (1, 10_000), "n_expert": (0, 2**16), "n_expert_active": (1, 2**16)}
LIMITS |= {"n_head": (1, 2**25), "n_kv_head": (0, 2**25), "n_embd": (1, 2**25), "n_hidden": (0, 2**27)}
LIMITS |= {"block_size": (1, 2**31), "vocab_size": (1, 2**31)}
# the fields that a run may set anew for weights that exist; the others describe the weights
OF_THE_RUN = ("block_size", "dropout", "residual_dtype")
CHOICES = {"arch": ARCHS, "residual_dtype": ("float32", "bfloat16")}


@dataclass
class GPTConfig:
    """
    A model's shape. Fields that are 0 or None take the architecture's default.

    Args:
        bias: use biases in Linear and LayerNorm, as GPT-2 does; False is slightly faster. The other
            architectures use no biases.
        gelu: 'none' (the exact GELU, as in nanoGPT) or 'tanh' (the approximation that GPT-2 was trained
            with).
        arch: a key of ARCHS.
        n_kv_head: heads of keys and values, each for n_head / n_kv_head heads of queries (Ainslie et al.
            2023, arXiv:2305.13245). Default: n_head.
        n_hidden: width of the MLP's hidden layer. Default: 4 n_embd; llama: 8/3 n_embd, rounded up to a
            multiple of 64.
        tied: whether wte and lm_head share their weights.
        norm_eps: added to the variance in norms.
        rope_theta: base of the rotary positions' frequencies.
        n_expert: MLPs in each block, n_expert_active of which each token uses, see experts.py. 0: one MLP for
            all tokens.
        balance_loss, router_z_loss: coefficients of the router's auxiliary losses.
        residual_dtype: float32 or bfloat16, in which autocast in bfloat16 leaves what passes from block to
            block. Without such autocast, it has no effect.
    """

    block_size: int = 1024
    vocab_size: int = 50304  # GPT-2's 50257, padded to a multiple of 64 for faster matmuls
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    dropout: float = 0.0
    bias: bool = True
    gelu: str = "none"
    arch: str = "gpt2"
    n_kv_head: int = 0
    n_hidden: int = 0
    tied: bool | None = None
    norm_eps: float = 0.0
    rope_theta: float = 10000.0
    n_expert: int = 0
    n_expert_active: int = 2
    balance_loss: float = 0.01
    router_z_loss: float = 0.001
    residual_dtype: str = "float32"

    def __post_init__(self) -> None:
        if problems := problems_of_shape(vars(self)):
            raise ValueError("\n".join(problems))
        arch = ARCHS[self.arch]
        self.bias = self.bias and self.arch == "gpt2"
        self.n_kv_head = self.n_kv_head or self.n_head
        width = 64 * math.ceil(self.n_embd / 24)  # 8/3 n_embd, since SwiGLU uses a third matrix
        self.n_hidden = self.n_hidden or (width if arch.activation == "swiglu" else 4 * self.n_embd)
        self.tied = arch.tied if self.tied is None else self.tied
        self.norm_eps = self.norm_eps or arch.norm_eps

    @property
    def qkv_rows(self) -> tuple[int, int, int]:
        """Heights of the query, key and value projections that are stacked in `c_attn`."""
        kv_rows = self.n_kv_head * (self.n_embd // self.n_head)
        return self.n_embd, kv_rows, kv_rows


def problems_of_shape(values: dict) -> list[str]:
    """
    A sentence for each value with which no model can be made.

    Args:
        values: some of GPTConfig's fields; the others are assumed to be the defaults.
    """
    c = SimpleNamespace(**{field.name: field.default for field in fields(GPTConfig)} | values)
    problems = []
    for name, (least, most) in LIMITS.items():
        if not least <= getattr(c, name) <= most:
            problems.append(f"{name} is {getattr(c, name)}: it must be from {least} to {most}")
    for name, choices in CHOICES.items():
        if getattr(c, name) not in choices:
            problems.append(f"{name} is {reprlib.repr(getattr(c, name))}; choose from {', '.join(choices)}")
    if problems:
        return problems
    if 0 < c.n_expert < c.n_expert_active:
        problems.append(f"n_expert_active is {c.n_expert_active}: set it to at most n_expert, {c.n_expert}")
    # rotary positions rotate pairs of a head's features
    multiple, name = (2 * c.n_head, "2 n_head") if ARCHS[c.arch].rotation else (c.n_head, "n_head")
    if c.n_embd % multiple:
        width = multiple * max(1, round(c.n_embd / multiple))
        advice = f"set --n_embd={width}"
        problems.append(f"n_embd is {c.n_embd}: it must be a multiple of {name}, {multiple}: {advice}")
    if c.n_kv_head and c.n_head % c.n_kv_head:
        divisor = 0 if c.arch == "gpt2" else math.gcd(c.n_head, c.n_kv_head)  # gpt2: as many as n_head
        advice = f"set --n_kv_head={divisor}"
        problems.append(f"n_kv_head is {c.n_kv_head}: it must divide n_head, {c.n_head}: {advice}")
    return problems
