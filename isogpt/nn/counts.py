"""
Count the parameters and the FLOPs of a model from its modules, on the meta device too, so that the numbers
follow an edit of model.py.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

from isogpt.nn.architecture import GPTConfig
from isogpt.nn.experts import ExpertLinear


@dataclass(frozen=True)
class Counts:
    """
    The parameters of a block, or of a module outside of the blocks.

    A parameter that several modules share, such as that of a tied head, counts as a parameter in the first of
    them only, but in all of them as `used`.

    Args:
        parameters: all parameters.
        experts: those of the experts.
        embeddings: those that are looked up: of nn.Embedding.
        used: those that each token is multiplied by, 2 FLOPs each in the forward pass: all but embeddings and
            the experts that a token does not use.
        matrices: `used` without vectors, such as biases and the weights of norms.
    """

    parameters: int = 0
    experts: int = 0
    embeddings: int = 0
    used: int = 0
    matrices: int = 0


@dataclass(frozen=True, eq=False)  # hashed by identity, for caches
class ModelCounts:
    """
    The parameters of a model, by the place of their modules.

    Args:
        blocks: of each block.
        outside: of the modules outside of the blocks, by name, such as wte and lm_head.
        model_class: the model's class, which may be edited.
    """

    blocks: list[Counts]
    outside: dict[str, Counts]
    model_class: type[nn.Module] = field(repr=False)

    @property
    def parameters(self) -> int:
        """Parameters of the model."""
        return sum(counts.parameters for counts in (*self.blocks, *self.outside.values()))

    @property
    def experts(self) -> int:
        """Parameters of all experts."""
        return sum(block.experts for block in self.blocks)

    @property
    def used(self) -> int:
        """Parameters that each token is multiplied by."""
        return sum(counts.used for counts in (*self.blocks, *self.outside.values()))

    @property
    def matrices(self) -> int:
        """`used` without vectors."""
        return sum(counts.matrices for counts in (*self.blocks, *self.outside.values()))


def count_model(model: nn.Module) -> ModelCounts:
    """
    Count the parameters of a whole model, before it is divided. What a parameter is used for follows from the
    module that holds it: the weight of an nn.Embedding is looked up, a token uses n_expert_active of the
    n_expert experts of an ExpertLinear, and is multiplied once by any other parameter.
    """
    c, counted = model.config, set()
    places = {f"h.{i}": Counter() for i in range(len(model.transformer.h))}
    for name, module, p in parameters_in_use(model):
        place = places.setdefault(place_of(name), Counter())
        size = p.numel()
        if p not in counted:
            counted.add(p)
            place["parameters"] += size
            place["experts"] += size if isinstance(module, ExpertLinear) else 0
            place["embeddings"] += size if isinstance(module, nn.Embedding) else 0
        if isinstance(module, ExpertLinear):
            size = size * c.n_expert_active // c.n_expert
        if not isinstance(module, nn.Embedding):
            place["used"] += size
            place["matrices"] += size if p.dim() > 1 else 0
    blocks = [Counts(**places.pop(f"h.{i}")) for i in range(len(model.transformer.h))]
    outside = {name: Counts(**place) for name, place in places.items()}
    return ModelCounts(blocks, outside, type(model))


def count_on_meta(model_class: Callable[[GPTConfig], nn.Module], model_args: dict) -> ModelCounts:
    """`count_model` of a model that is made on the meta device for this, without memory."""
    with torch.device("meta"):
        return count_model(model_class(GPTConfig(**model_args)))


def parameters_in_use(model: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Parameter]]:
    """Yield the name, the module and the parameter for each place in which a parameter is used."""
    for path, module in model.named_modules(remove_duplicate=False):
        for name, p in module.named_parameters(recurse=False):
            yield f"{path}.{name}" if path else name, module, p


def place_of(name: str) -> str:
    """The place of a parameter: h.0 of transformer.h.0.mlp.c_fc.weight, wte of transformer.wte.weight."""
    first, *rest = name.removeprefix("transformer.").split(".")
    return f"h.{rest[0]}" if first == "h" else first


def flops_per_token(counts: ModelCounts, config: GPTConfig) -> float:
    """
    Return the FLOPs of one token's forward and backward pass: 6 N + 12 L H Q T (PaLM, appendix B,
    arXiv:2204.02311). N, the parameters that the token is multiplied by, is counted. The second term,
    attention's, is a formula of n_layer, n_embd and block_size, so it does not follow an edit of attention.

    FLOPs are not counted in a forward pass on the meta device, which would leave meta tensors in whatever an
    edited model.py caches.
    """
    return 6 * counts.used + 12 * config.n_layer * config.n_embd * config.block_size
