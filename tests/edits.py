"""
Edits of model.py as users make them, each as replacements of text, and what becomes of them on each layout; and
the changes of docs/changing-the-model.md and docs/recipes.md, which are read from there.
"""

import re
import shutil
import subprocess
from pathlib import Path
from textwrap import indent

REPO = Path(__file__).resolve().parent.parent
PAGES = REPO / "docs" / "changing-the-model.md", REPO / "docs" / "recipes.md"

ATTENTION_INIT = "        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)\n"
ATTENTION_END = "        return self.resid_dropout(self.c_proj(y))  # (B, T, C)\n"
ATTEND = "        y = self.seams.attention(q, k, v, self.dropout if self.training else 0.0, cache)  # (B, T, H * D)\n"
MLP_INIT = "        self.mlp = make_mlp(config)\n"
BLOCKS = '            self.transformer["h"] = nn.ModuleList(Block(config) for _ in range(config.n_layer))\n'
HEAD = "            self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)\n"
EMBED_END = "        return self.transformer.drop(x)\n"
BLOCK_INIT = "class Block(nn.Module):\n    def __init__(self, config: GPTConfig) -> None:\n"
NUMBERED = [
    (BLOCKS, BLOCKS.replace("Block(config) for _", "Block(config, i) for i")),
    (BLOCK_INIT, BLOCK_INIT.replace("config: GPTConfig)", "config: GPTConfig, layer: int)")),
]
FIRST = "        x = x + self.attn(self.ln_1(x), rope, cache)\n"
SECOND = "            return x + self.mlp(self.ln_2(x))\n"
RULES = "INITIAL_VALUES: dict[str, Rule] = {}\n"
LOSS = "        return logits, self.seams.loss(x, self.lm_head.weight, targets, self.arch.softcap) / count\n"
APPLY = "            x = block(x, rope, caches[int(number)] if caches else None)\n"
EMBED = "        x = self.embed(idx, positions)\n"
LAST_NORM = "        x = self.transformer.ln_f(x)\n"
MASKED = (
    "        q, k, v = (t.transpose(1, 2) for t in (q, k, v))\n"
    "        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)\n"
)
WINDOWED = (
    "        mask = torch.ones(T, T, dtype=torch.bool, device=x.device).tril().triu(1 - window)\n" + MASKED
)


def rule(pattern, value):
    """A line of INITIAL_VALUES."""
    return RULES, RULES.replace("{}", f'{{r"{pattern}": {value}}}')


def after(line, more):
    """Add lines after a line."""
    return line, line + more


# {name: replacements in model.py}
EDITS = {
    "token shift": [(EMBED_END, "        x = (x + F.pad(x, (0, 0, 1, 0))[:, :-1]) / 2\n" + EMBED_END)],
    "one more linear": [
        after(ATTENTION_INIT, "        self.c_more = nn.Linear(config.n_embd, config.n_embd, bias=False)\n"),
        (ATTENTION_END, "        return self.resid_dropout(self.c_more(self.c_proj(y)))\n"),
    ],
    "attention in the seam": [
        (
            "qk_norm else None\n        self.seams = Seams()",
            "qk_norm else None\n        self.seams = Seams(attention=banded)",
        ),
        (
            "class CausalSelfAttention(nn.Module):\n",
            "def banded(q, k, v, dropout=0.0, cache=None):\n"
            "    mask = torch.ones(q.size(1), q.size(1), dtype=torch.bool).tril().triu(-4)\n"
            "    q, k, v = (t.transpose(1, 2) for t in (q, k, v))\n"
            "    return F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2)\n\n\n"
            "class CausalSelfAttention(nn.Module):\n",
        ),
    ],
    "shared blocks": [
        (
            BLOCKS,
            "            pairs = [Block(config) for _ in range(config.n_layer // 2)]\n"
            '            self.transformer["h"] = nn.ModuleList(pairs[i // 2] for i in range(config.n_layer))\n',
        )
    ],
    "shared MLP of distant blocks": [
        after(BLOCKS, "            self.transformer.h[-1].mlp = self.transformer.h[0].mlp\n")
    ],
    "no first MLP": [
        *NUMBERED,
        (MLP_INIT, "        self.mlp = make_mlp(config) if layer else None\n"),
        (SECOND, "            return x + self.mlp(self.ln_2(x)) if self.mlp else x + 0 * self.ln_2(x)\n"),
    ],
    "tied weights of two linears": [
        after(
            ATTENTION_INIT,
            "        self.c_one = nn.Linear(config.n_embd, config.n_embd, bias=False)\n"
            "        self.c_two = nn.Linear(config.n_embd, config.n_embd, bias=False)\n"
            "        self.c_two.weight = self.c_one.weight\n",
        ),
        (
            ATTENTION_END,
            "        return self.resid_dropout(self.c_two(F.gelu(self.c_one(self.c_proj(y)))))\n",
        ),
    ],
    "value embeddings": [
        after(
            ATTENTION_INIT,
            "        self.values = nn.Embedding(config.vocab_size, config.n_embd)\n        self.idx = None\n",
        ),
        (ATTEND, "        v = v + self.values(self.idx).view(B, T, -1, self.head_size)\n" + ATTEND),
        (
            "        x = self.embed(idx, positions)\n",
            "        x = self.embed(idx, positions)\n"
            "        for block in self.transformer.h:\n            block.attn.idx = idx\n",
        ),
    ],
    "convolution in each block": [
        after(
            MLP_INIT,
            "        self.conv = nn.Conv1d(config.n_embd, config.n_embd, 3, groups=config.n_embd, bias=False)\n",
        ),
        (FIRST, "        x = x + self.conv(F.pad(x.mT, (2, 0))).mT\n" + FIRST),
        rule(r".*\.conv\.weight", '"normal"'),
    ],
    "factorized embedding": [
        (
            "torch.empty(config.vocab_size, config.n_embd), freeze=False)",
            "torch.empty(config.vocab_size, 12), freeze=False)",
        ),
        after(HEAD, "            self.widen = nn.Linear(12, config.n_embd, bias=False)\n"),
        ("        x = self.transformer.wte(idx)\n", "        x = self.widen(self.transformer.wte(idx))\n"),
    ],
    "MLPs of different width": [
        *NUMBERED,
        (
            MLP_INIT,
            "        self.mlp = make_mlp(replace(config, n_hidden=config.n_hidden * (1 + layer % 2)))\n",
        ),
    ],
    "extra bias": [
        after(MLP_INIT, "        self.extra = nn.Parameter(torch.zeros(config.n_embd))\n"),
        (SECOND, "            return x + self.mlp(self.ln_2(x)) + self.extra\n"),
        rule(r".*\.extra", 0.0),
    ],
    "bias of the head": [(HEAD, HEAD.replace("bias=False", "bias=True"))],
    "auxiliary mean": [(LOSS, LOSS.replace("/ count\n", "/ count + 0.01 * x.float().square().mean()\n"))],
    "zero-initialized scalar": [
        after(MLP_INIT, "        self.alpha = nn.Parameter(torch.zeros(()))\n"),
        (SECOND, "            return x + self.alpha * self.mlp(self.ln_2(x))\n"),
        rule(r".*\.alpha", 0.0),
    ],
    "buffer": [
        after(MLP_INIT, '        self.register_buffer("slope", torch.linspace(0.5, 1.5, config.n_embd))\n'),
        (SECOND, "            return x + self.slope * self.mlp(self.ln_2(x))\n"),
        rule(r".*\.slope", "lambda config: torch.linspace(0.5, 1.5, config.n_embd)"),
    ],
    "gate of each head": [
        after(ATTENTION_INIT, "        self.gate = nn.Linear(config.n_embd, config.n_head)\n"),
        (
            ATTENTION_END,
            "        y = (y.view(B, T, H, -1) * self.gate(x).sigmoid()[..., None]).flatten(2)\n"
            + ATTENTION_END,
        ),
    ],
    "dropout with a rate of its own": [
        (EMBED_END, EMBED_END.rstrip() + ".lerp(F.dropout(x, 0.5, self.training), 0.5)\n")
    ],
    "skip from the fourth to the ninth block": [
        (
            "            x = block(x, rope, caches[int(number)] if caches else None)\n",
            "            x = block(x, rope, caches[int(number)] if caches else None)\n"
            "            early = x if number == 3 else early\n"
            "            x = x + early if number == 8 else x\n",
        ),
        ("        routings = []\n", "        routings, early = [], 0.0\n"),
    ],
    "weights that are normalized in the forward pass": [
        (
            SECOND,
            "            with torch.no_grad():\n"
            "                self.mlp.c_fc.weight.copy_(F.normalize(self.mlp.c_fc.weight, dim=-1))\n"
            + SECOND,
        )
    ],
    "register tokens": [
        after(HEAD, "            self.registers = nn.Parameter(torch.empty(4, config.n_embd))\n"),
        (
            EMBED_END,
            "        x = self.transformer.drop(x)\n"
            "        return torch.cat((self.registers.expand(x.size(0), -1, -1), x), 1)\n",
        ),
        (LAST_NORM, LAST_NORM.replace("(x)", "(x[:, 4:])")),
        rule("registers", '"normal"'),
    ],
    "mixture of depths": [
        (
            SECOND,
            "            s = self.router(x).squeeze(-1)\n"
            "            top = s.topk(x.size(1) // 2, dim=1).indices.sort(1).values[..., None]\n"
            "            top = top.expand(-1, -1, x.size(-1))\n"
            "            g = s.gather(1, top[..., 0]).sigmoid()[..., None]\n"
            "            y = g * self.mlp(self.ln_2(x.gather(1, top)))\n"
            "            return x.scatter_add(1, top, y.type_as(x))\n",
        ),
        after(MLP_INIT, "        self.router = nn.Linear(config.n_embd, 1, bias=False)\n"),
    ],
    "ternary MLP": [
        (
            "class MLP(nn.Module):\n",
            "class BitLinear(nn.Linear):\n"
            "    def forward(self, x):\n"
            "        w, scale = self.weight, self.weight.abs().mean()\n"
            "        rounded = (w / (scale + 1e-5)).round().clamp(-1, 1) * scale\n"
            "        return F.linear(x, w + (rounded - w).detach(), self.bias)\n\n\n"
            "class MLP(nn.Module):\n",
        ),
        (
            "        self.c_fc = linear(config.n_embd, config.n_hidden, bias=config.bias)\n",
            "        self.c_fc = BitLinear(config.n_embd, config.n_hidden, bias=config.bias)\n",
        ),
    ],
    "frozen embeddings": [after(HEAD, "            self.transformer.wte.weight.requires_grad_(False)\n")],
    "blocks applied twice": [
        ("        for number, block in blocks:\n", "        for number, block in [*blocks] * 2:\n")
    ],
    "block that runs as often as its input says": [
        (
            "            x = block(x, rope, caches[int(number)] if caches else None)\n",
            "            for _ in range(1 + int(number == 1 and x[0, 0, 0] > 0)):\n"
            "                x = block(x, rope, caches[int(number)] if caches else None)\n",
        )
    ],
    "block that every other step uses": [
        (
            "            x = block(x, rope, caches[int(number)] if caches else None)\n",
            "            if number != 1 or self.step % 2 == 0:\n"
            "                x = block(x, rope, caches[int(number)] if caches else None)\n",
        )
    ],
    "running average in a buffer": [
        after(MLP_INIT, '        self.register_buffer("mean", torch.zeros(config.n_embd))\n'),
        (
            SECOND,
            "            if self.training:\n                self.mean.lerp_(x.detach().mean((0, 1)), 0.1)\n"
            "            return x - self.mean + self.mlp(self.ln_2(x))\n",
        ),
        rule(r".*\.mean", 0.0),
    ],
    "embeddings of limited norm": [
        (
            "torch.empty(config.vocab_size, config.n_embd), freeze=False)",
            "torch.empty(config.vocab_size, config.n_embd), freeze=False, max_norm=0.1)",
        )
    ],
    "field of the config": [
        (
            "def call(function",
            "@dataclass\nclass GPTConfig(GPTConfig):\n    scale: float = 0.5\n\n\ndef call(function",
        ),
        after(MLP_INIT, "        self.scale = config.scale\n"),
        (SECOND, "            return x + self.scale * self.mlp(self.ln_2(x))\n"),
    ],
    "branch on a rare token": [
        after(HEAD, "            self.special = nn.Linear(config.n_embd, config.n_embd, bias=False)\n"),
        after(
            EMBED,
            "        if (idx == 3).any():\n            x = x + (idx == 3)[..., None] * self.special(x)\n",
        ),
    ],
    "documents that a rare token separates": [
        (
            ATTEND,
            "        mask = self.mask\n"
            "        if mask is not None:\n" + indent(MASKED, "    ") + "        else:\n    " + ATTEND,
        ),
        after(ATTENTION_INIT, "        self.mask = None\n"),
        after(
            EMBED,
            "        document, mask = (idx == 60).cumsum(1), None\n"
            "        if (idx == 60).any():\n"
            "            mask = (document[:, None, :, None] == document[:, None, None]).tril()\n"
            "        for block in self.transformer.h:\n            block.attn.mask = mask\n",
        ),
    ],
    "kernel for certain heads": [
        after(
            ATTENTION_INIT,
            '        assert self.head_size % 32 == 0, "the kernel needs heads of 32, 64 or 128"\n',
        )
    ],
    "window that long sequences reach": [
        (
            ATTEND,
            "        window = 256\n"
            "        if T > window:\n" + indent(WINDOWED, "    ") + "        else:\n    " + ATTEND,
        )
    ],
    "window that counts calls": [
        after(ATTENTION_INIT, "        self.calls = 0\n"),
        (ATTEND, "        self.calls += self.training\n        window = 4 + self.calls // 4\n" + WINDOWED),
    ],
    "window of the step": [
        after(ATTENTION_INIT, "        self.step = 0\n"),
        (ATTEND, "        window = 4 + self.step\n" + WINDOWED),
    ],
    "two tokens ahead": [
        after(HEAD, "            self.ahead = Block(config)\n"),
        (
            LOSS,
            "        loss = self.seams.loss(x, self.lm_head.weight, targets, self.arch.softcap)\n"
            "        if self.training:\n"
            "            later = F.pad(targets[:, 1:], (0, 1), value=IGNORE)\n"
            "            loss = loss + 0.3 * self.seams.loss(self.ahead(x), self.lm_head.weight, later, 0.0)\n"
            "        return logits, loss / count\n",
        ),
    ],
    "linear biases of positions": [
        (
            ATTEND,
            "        slopes = 2.0 ** (-8 / H * torch.arange(1, H + 1, device=x.device))\n"
            "        steps = torch.arange(T, device=x.device)\n"
            "        mask = slopes[:, None, None] * (steps - steps[:, None])\n"
            "        mask = mask.masked_fill(steps > steps[:, None], -math.inf)\n" + MASKED,
        )
    ],
    "one matrix up and down": [
        ("        self.c_proj = linear(config.n_hidden, config.n_embd, bias=config.bias)\n", ""),
        (
            "        return self.dropout(self.c_proj(hidden, *counts))\n",
            "        return self.dropout(F.linear(hidden, self.c_fc.weight.T))\n",
        ),
    ],
    "memory of the previous micro-batch": [
        after(ATTENTION_INIT, "        self.memory = None\n"),
        (
            ATTEND,
            "        y = self.seams.attention(q, k, v, self.dropout if self.training else 0.0, cache)\n"
            "        if self.training:\n"
            "            if self.memory is not None:\n"
            "                past_k, past_v = (t.transpose(1, 2) for t in self.memory)\n"
            "                past = F.scaled_dot_product_attention(q.transpose(1, 2), past_k, past_v)\n"
            "                y = y + past.transpose(1, 2).flatten(2)\n"
            "            self.memory = k.detach(), v.detach()\n",
        ),
    ],
    "label smoothing": [
        (
            LOSS,
            "        if self.training:\n"
            "            rows = soft_cap(self.lm_head(x), self.arch.softcap).flatten(0, 1).float()\n"
            "            options = dict(reduction='sum', ignore_index=IGNORE, label_smoothing=0.1)\n"
            "            return None, F.cross_entropy(rows, targets.flatten(), **options) / count\n" + LOSS,
        )
    ],
}


# edits that are refused on one process, too
REFUSED = {
    "transformer.h.0.alpha": [after(MLP_INIT, "        self.alpha = nn.Parameter(torch.zeros(()))\n")],
    "__init__ sets transformer.h.0.attn.gate.weight": [
        after(
            ATTENTION_INIT,
            "        self.gate = nn.Linear(config.n_embd, config.n_embd)\n"
            "        nn.init.zeros_(self.gate.weight)\n",
        )
    ],
    "a hook of transformer.wte.weight": [
        after(HEAD, "            self.transformer.wte.weight.register_hook(lambda grad: 0.1 * grad)\n")
    ],
    "transformer.h.0.attn.masks in model.py is a tensor": [
        after(ATTENTION_INIT, "        self.masks = [torch.ones(8, 8).tril()]\n")
    ],
    "transformer.h.0.extra in model.py is a dict of modules": [
        after(MLP_INIT, '        self.extra = {"a": nn.Linear(config.n_embd, config.n_embd)}\n')
    ],
    "transformer.h.0.slope in model.py is a tensor": [
        after(MLP_INIT, "        self.slope = torch.linspace(0.5, 1.5, config.n_embd)\n")
    ],
    "GPT(config) fails on the meta device: RuntimeError: Tensor.item() cannot be called on meta": [
        *NUMBERED,
        after(MLP_INIT, "        self.rate = torch.linspace(0, 0.2, config.n_layer)[layer].item()\n"),
    ],
}
# for tests of their own
OTHERS = {
    "rows that mix": [(EMBED_END, "        x = x - 0.5 * x.mean(0, keepdim=True)\n" + EMBED_END)],
    "crash": [(EMBED_END, "        raise RuntimeError('a bug')\n")],
}
ALL = EDITS | REFUSED | OTHERS
# ways on which edits are tried; the last is ddp, too
TRIED = ("zero 3", "tp 2", "cp 2", "pp 2, 1f1b", "pp 2, zbv", "exact", "recompute full")
# settings with which an edit is tried
SETTINGS = {
    "factorized embedding": {"arch": "llama"},
    # whose matrix tp leaves whole, beside divided ones
    "one more linear": {"arch": "llama", "optimizer": "muon"},
    "skip from the fourth to the ninth block": {"n_layer": 12},
    "embeddings of limited norm": {"arch": "llama"},  # gpt2's are also the head's weights
    "kernel for certain heads": {"n_embd": 64, "n_head": 2},
    "window that long sequences reach": {"block_size": 1024},
}


SEQUENCE = {"tp 2": "differs", "cp 2": "differs"}  # of edits that mix positions outside of attention
PIPELINES = ("pp 2, 1f1b", "pp 2, zbv")
# {name: {way: what the check says}}; on all other ways, an edit holds
EXPECTED = {
    "token shift": SEQUENCE,
    "attention in the seam": {"cp 2": "refused"},
    "shared blocks": {"pp 2, zbv": "refused"},
    "shared MLP of distant blocks": {"zero 3": "refused"} | dict.fromkeys(PIPELINES, "refused"),
    "value embeddings": {"tp 2": "crashed"} | dict.fromkeys(PIPELINES, "crashed"),
    "convolution in each block": SEQUENCE,
    "factorized embedding": dict.fromkeys(PIPELINES, "differs"),
    # a parameter without a gradient, for which DDP waits
    "bias of the head": dict.fromkeys(("cp 2", "exact", "recompute full"), "refused"),
    "auxiliary mean": dict.fromkeys(("zero 3", "tp 2", "cp 2", "recompute full"), "differs"),
    "zero-initialized scalar": {"zero 3": "crashed"},
    "gate of each head": {"tp 2": "crashed"},
    "dropout with a rate of its own": SEQUENCE | dict.fromkeys(PIPELINES, "differs"),
    "skip from the fourth to the ninth block": dict.fromkeys(PIPELINES, "differs"),
    "weights that are normalized in the forward pass": {"zero 3": "refused"}
    | dict.fromkeys(PIPELINES, "crashed"),
    "register tokens": SEQUENCE | dict.fromkeys(PIPELINES, "refused"),
    "mixture of depths": SEQUENCE,
    "ternary MLP": {"tp 2": "differs"},
    "blocks applied twice": {"pp 2, 1f1b": "differs", "pp 2, zbv": "crashed"},
    "block that runs as often as its input says": dict.fromkeys(("zero 3", "cp 2", *PIPELINES), "refused"),
    # in a pipeline, no rank waits for its gradient
    "block that every other step uses": dict.fromkeys(
        ("zero 3", "tp 2", "cp 2", "exact", "recompute full"), "refused"
    ),
    "running average in a buffer": dict.fromkeys(TRIED, "refused"),
    "embeddings of limited norm": dict.fromkeys(TRIED, "refused"),
    "branch on a rare token": dict.fromkeys(TRIED, "refused"),
    "documents that a rare token separates": {"cp 2": "differs"} | dict.fromkeys(PIPELINES, "differs"),
    "window that long sequences reach": {"cp 2": "differs"},
    # besides, a run ends after its second step
    "window that counts calls": dict.fromkeys(("cp 2", "recompute full"), "differs"),
    "window of the step": {"cp 2": "differs"},
    "two tokens ahead": SEQUENCE | dict.fromkeys(PIPELINES, "differs"),
    "linear biases of positions": SEQUENCE,
    "one matrix up and down": {"tp 2": "crashed"},
    "memory of the previous micro-batch": dict.fromkeys(("zero 3", "cp 2", "exact"), "differs")
    | {"recompute full": "crashed"},
    "label smoothing": {"tp 2": "refused"},
}


def edited(replacements, source):
    """The text after the replacements, each of which must apply once."""
    for old, new in replacements:
        assert source.count(old) == 1, f"{source.count(old)} times: {old}"
        source = source.replace(old, new)
    return source


def edited_gpt(name):
    """GPT of model.py with an edit."""
    space = {"__name__": "model"}
    exec(edited(ALL[name], (REPO / "model.py").read_text()), space)
    return space["GPT"]


# With n_layer=4, n_embd=64, n_head=4, vocab_size=65, bias=False, tied=False: {name of an edit: (parameters that
# it adds, those that a token is multiplied by)}
COUNTED = {
    "value embeddings": (4 * 65 * 64, 0),
    "gate of each head": (4 * 65 * 4, 4 * 65 * 4),
    "MLPs of different width": (2 * 2**15, 2 * 2**15),
    "no first MLP": (-(2**15), -(2**15)),
    "shared MLP of distant blocks": (-(2**15), 0),
    "shared blocks": (-2 * (12 * 64**2 + 2 * 64), 0),
    "tied weights of two linears": (4 * 64**2, 8 * 64**2),
    "convolution in each block": (4 * 3 * 64, 4 * 3 * 64),
    "factorized embedding": (12 * (65 + 64) - 65 * 64, 12 * 64),
    "extra bias": (4 * 64, 4 * 64),
}
COUNTED_SHAPE = dict(
    n_layer=4, n_head=4, n_embd=64, block_size=32, vocab_size=65, bias=False, tied=False, arch="gpt2"
)


def copy_of_repository(folder):
    """A copy of what trains, in a folder."""
    folder.mkdir()
    for pattern in ("*.py", "isogpt", "config", "data"):
        for path in REPO.glob(pattern):
            copy = shutil.copytree if path.is_dir() else shutil.copy
            copy(path, folder / path.name)
    return folder


def documented():
    """{heading: section} of the changes in the docs: those that say which files they touch."""
    sections = [section for page in PAGES for section in re.split(r"^## ", page.read_text(), flags=re.M)]
    return {section.splitlines()[0]: section for section in sections if "\nFiles: " in section}


def blocks(section, kind):
    """The blocks of a kind in a section, one after the other."""
    return "".join(re.findall(rf"^```{kind}\n(.*?)^```", section, flags=re.S | re.M))


def diff_of(section):
    """A section's diff: its block, or the file that it links to."""
    if link := re.search(r"\]\(([^)\s]+\.diff)\)", section):
        return (REPO / "docs" / link[1]).read_text()
    return blocks(section, "diff")


def apply(name, folder):
    """A copy of the repository with an edit, by its name or its heading in the docs."""
    repo = copy_of_repository(Path(folder))
    if name in ALL:
        path = repo / "model.py"
        path.write_text(edited(ALL[name], path.read_text()))
    elif diff := diff_of(documented()[name]):
        subprocess.run(["patch", "-p1"], input=diff, text=True, cwd=repo, check=True)
    return repo


def edited_train(folder, *replacements):
    """Write a train.py with an edit, which imports the repository's modules, to a folder; returns the folder."""
    text = edited(replacements, (REPO / "train.py").read_text())
    (Path(folder) / "train.py").write_text(f"import sys\n\nsys.path.insert(0, {str(REPO)!r})\n{text}")
    return folder
