"""
Count the parameters and the FLOPs of a model from its modules, on the meta device too, so that the numbers
follow an edit of model.py.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass, field

import torch
from torch import nn

from isogpt.common.console import error_text
from isogpt.nn.architecture import GPTConfig
from isogpt.nn.experts import ExpertLinear


@dataclass(frozen=True, eq=False)  # hashed by identity, for caches
class Counts:
    """
    The parameters of a block, of a module outside of the blocks, or of a model.

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


@dataclass(frozen=True, eq=False, kw_only=True)
class ModelCounts(Counts):
    """
    The parameters of a model, and by the place of their modules.

    Args:
        blocks: of each block.
        outside: of the modules outside of the blocks, by name, such as wte and lm_head.
        model_class: the model's class, which may be edited.
    """

    blocks: list[Counts]
    outside: dict[str, Counts]
    model_class: type[nn.Module] = field(repr=False)


def count_model(model: nn.Module) -> ModelCounts:
    """
    Count the parameters of a whole model, before it is divided. What a parameter is used for follows from the
    module that holds it: the weight of an nn.Embedding is looked up, a token uses n_expert_active of the
    n_expert experts of an ExpertLinear, and is multiplied once by any other parameter.
    """
    c, counted, places = model.config, set(), defaultdict(Counter)
    for name, p in model.named_parameters(remove_duplicate=False):
        module = model.get_submodule(name.rpartition(".")[0])
        is_expert, is_embedding = isinstance(module, ExpertLinear), isinstance(module, nn.Embedding)
        # h.0 of transformer.h.0.mlp.c_fc.weight, wte of transformer.wte.weight
        first, *rest = name.removeprefix("transformer.").split(".")
        place, size = places[f"h.{rest[0]}" if first == "h" else first], p.numel()
        if p not in counted:
            counted.add(p)
            place.update(parameters=size, experts=size * is_expert, embeddings=size * is_embedding)
        if is_expert:
            size = size * c.n_expert_active // c.n_expert
        if not is_embedding:
            place.update(used=size, matrices=size * (p.dim() > 1))
    total = sum(places.values(), Counter())
    blocks = [Counts(**places.pop(f"h.{i}", {})) for i in range(len(model.transformer.h))]
    outside = {name: Counts(**place) for name, place in places.items()}
    return ModelCounts(**total, blocks=blocks, outside=outside, model_class=type(model))


def make_model(
    model_class: type[nn.Module], model_args: dict, device: str = "meta", seed: int | None = None
) -> nn.Module:
    """
    Make a model, by default on the meta device, without memory.

    Raises:
        ValueError: an edited model cannot be made there.
    """
    try:
        with torch.device(device):
            return model_class(model_class.config_class(**model_args), seed)
    except ValueError as e:  # a sentence for the user, or a mistake
        raise ValueError(error_text(e).removeprefix("ValueError: ")) from e
    except Exception as e:
        text = f"GPT(config) fails on the {device} device: {error_text(e)}"
        if device == "meta":
            text += (
                ". Models are made there, where tensors have no values: use Python's numbers or device='cpu'"
            )
        raise ValueError(text) from e


def count_on_meta(model_class: type[nn.Module], model_args: dict) -> ModelCounts:
    """`count_model` of a model that is made on the meta device for this."""
    return count_model(make_model(model_class, model_args))


def flops_per_token(counts: ModelCounts, config: GPTConfig) -> float:
    """
    Return the FLOPs of one token's forward and backward pass: 6 N + 12 L H Q T (PaLM, appendix B,
    arXiv:2204.02311). N, the parameters that the token is multiplied by, is counted. The second term,
    attention's, is a formula of n_layer, n_embd and block_size, so it does not follow an edit of attention.

    FLOPs are not counted in a forward pass on the meta device, which would leave meta tensors in whatever an
    edited model.py caches.
    """
    return 6 * counts.used + 12 * config.n_layer * config.n_embd * config.block_size
