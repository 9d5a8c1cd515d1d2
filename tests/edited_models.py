"""
Models as a user edits model.py, on the meta device: subclasses of GPT whose blocks are changed after they are
made. EDITS lists them with what each adds, for SHAPE.
"""

from dataclasses import replace

import torch
from torch import nn

from model import GPT, MLP

# C = 64, an MLP of 2 x 64 x 256
SHAPE = dict(n_layer=3, n_head=4, n_embd=64, block_size=32, vocab_size=65, bias=False, tied=False)


class ValueEmbeddings(GPT):
    """An embedding of values in each block, which is looked up."""

    def __init__(self, config, seed=None):
        super().__init__(config, seed)
        for block in self.transformer.h:
            weight = torch.empty(config.vocab_size, config.n_embd)
            block.attn.values = nn.Embedding.from_pretrained(weight, freeze=False)


class Gates(GPT):
    """One more Linear in each block, and a scalar."""

    def __init__(self, config, seed=None):
        super().__init__(config, seed)
        for block in self.transformer.h:
            block.attn.gate = nn.Linear(config.n_embd, config.n_head, bias=False)
            block.scale = nn.Parameter(torch.ones(()))


class Widths(GPT):
    """The MLP of each block is wider than that of the block before."""

    def __init__(self, config, seed=None):
        super().__init__(config, seed)
        for i, block in enumerate(self.transformer.h):
            block.mlp = MLP(replace(config, n_hidden=(i + 1) * config.n_hidden))


class SharedMLP(GPT):
    """All blocks use one MLP."""

    def __init__(self, config, seed=None):
        super().__init__(config, seed)
        for block in self.transformer.h:
            block.mlp = self.transformer.h[0].mlp


class NoFirstMLP(GPT):
    """The first block has no MLP."""

    def __init__(self, config, seed=None):
        super().__init__(config, seed)
        self.transformer.h[0].mlp = nn.Identity()


class Convolutions(GPT):
    """Each channel of a block's input is convolved over four positions."""

    def __init__(self, config, seed=None):
        super().__init__(config, seed)
        for block in self.transformer.h:
            block.conv = nn.Conv1d(config.n_embd, config.n_embd, 4, groups=config.n_embd, bias=False)


class Factorized(GPT):
    """Embeddings of 16 features, and a matrix that makes them n_embd wide."""

    def __init__(self, config, seed=None):
        super().__init__(config, seed)
        narrow = nn.Embedding.from_pretrained(torch.empty(config.vocab_size, 16), freeze=False)
        self.transformer.wte = nn.Sequential(narrow, nn.Linear(16, config.n_embd, bias=False))


WTE = ["transformer.wte", "transformer.wte.0", "transformer.wte.1"]
# edit, parameters that it adds, those of them that a token is multiplied by, the modules that are edited
EDITS = [
    (ValueEmbeddings, 3 * 65 * 64, 0, ["transformer.h.*.attn.values"]),
    (Gates, 3 * (64 * 4 + 1), 3 * (64 * 4 + 1), ["transformer.h.*.attn.gate", "transformer.h.*.scale"]),
    (Widths, 3 * 2**15, 3 * 2**15, ["transformer.h.*.mlp.c_fc", "transformer.h.*.mlp.c_proj"]),
    (SharedMLP, -2 * 2**15, 0, []),
    (NoFirstMLP, -(2**15), -(2**15), ["transformer.h.*.mlp.c_fc", "transformer.h.*.mlp.c_proj"]),
    (Convolutions, 3 * 64 * 4, 3 * 64 * 4, ["transformer.h.*.conv"]),
    (Factorized, (65 + 64) * 16 - 65 * 64, 64 * 16, WTE),
]
