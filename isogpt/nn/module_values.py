"""Plain Python values that modules hold, of which checkpoints contain nothing."""

import json

from torch import nn

OF_EVERY_MODULE = vars(nn.Module()).keys()  # such as `training`


def plain_values(model: nn.Module) -> dict[str, str]:
    """
    Return the numbers, strings, and lists and dicts of these, that the modules of a model have as attributes,
    as JSON: {"transformer.h.0.attn.head_size": "64"}. None, tensors and other objects do not count.
    """
    values = {}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if value is None or name in OF_EVERY_MODULE:
                continue
            try:
                values[f"{path}.{name}".lstrip(".")] = json.dumps(value)
            except (TypeError, ValueError):  # contains something else, or itself
                continue
    return values
