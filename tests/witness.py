"""
What train.py trains, as a plain loop in plain PyTorch: GPT-2 with AdamW or Muon, and with DiLoCo's islands.

There is no line of isogpt/ and no process group here. Layouts that are compared with each other share their
faults, so test_witness.py compares train.py with this loop, which computes in float64.
"""

import hashlib
import math
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F

STREAMS = {"train": 0, "train_loss": 1, "val_loss": 2}  # of random numbers
BLOCK = ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")
# the polynomials of Muon: Amsel et al. 2025, arXiv:2505.16932, from 0.003, each a little slower
POLYNOMIALS = [
    (8.38367387811402, -24.76590653282787, 18.357082301758982),
    (4.0434204386149215, -3.0114050003050528, 0.5695121518621704),
    (3.5055706057721077, -2.6266538337451224, 0.525719406014519),
]


def initial_weights(s):
    """{name: weights}, drawn from (seed, name) by Philox, and made normal as Box and Muller (1958) do."""
    C, std = s.n_embd, 0.02 / math.sqrt(2 * s.n_layer)
    shapes = {"transformer.wte.weight": (s.vocab_size, C), "transformer.wpe.weight": (s.block_size, C)}
    shapes["transformer.ln_f.weight"] = (C,)
    for i in range(s.n_layer):
        block = {"ln_1": (C,), "attn.c_attn": (3 * C, C), "attn.c_proj": (C, C)}
        block |= {"ln_2": (C,), "mlp.c_fc": (4 * C, C), "mlp.c_proj": (C, 4 * C)}
        shapes |= {f"transformer.h.{i}.{name}.weight": shape for name, shape in block.items()}
    weights = {}
    for name, shape in shapes.items():
        weights[name] = torch.ones(shape, dtype=torch.float64)
        if len(shape) == 2:
            key = int.from_bytes(hashlib.sha256(f"{s.seed} {name}".encode()).digest()[:16], "little")
            words = np.random.Philox(key=key).random_raw(math.prod(shape) // 2 + 1)
            one, two = words.view(np.uint32).reshape(-1, 2).T * 2.0**-32
            radius, angle = np.sqrt(-2 * np.log(one + 2.0**-33)), 2 * np.pi * two
            normal = np.stack((radius * np.cos(angle), radius * np.sin(angle)), -1).ravel()
            normal = torch.from_numpy(normal[: math.prod(shape)]).view(shape)
            weights[name] = normal * (std if "c_proj" in name else 0.02)
    weights["lm_head.weight"] = weights["transformer.wte.weight"]  # tied
    return weights


def mean_loss(w, sequences, s):
    """The mean cross-entropy of GPT-2 over the targets of sequences (B, T + 1)."""
    x, y = sequences[:, :-1], sequences[:, 1:]
    h = w["transformer.wte.weight"][x] + w["transformer.wpe.weight"]  # (B, T, C)
    for i in range(s.n_layer):
        block = {name: w[f"transformer.h.{i}.{name}.weight"] for name in BLOCK}
        q, k, v = (norm(h, block["ln_1"]) @ block["attn.c_attn"].T).chunk(3, -1)
        q, k, v = (t.unflatten(-1, (s.n_head, -1)).transpose(1, 2) for t in (q, k, v))  # (B, H, T, D)
        scores = q @ k.mT / math.sqrt(q.size(-1))
        scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -math.inf)
        attended = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        h = h + attended @ block["attn.c_proj"].T
        hidden = F.gelu(norm(h, block["ln_2"]) @ block["mlp.c_fc"].T)
        h = h + hidden @ block["mlp.c_proj"].T
    logits = norm(h, w["transformer.ln_f.weight"]) @ w["lm_head.weight"].T
    return F.cross_entropy(logits.flatten(0, 1), y.flatten())


def norm(x, weight):
    """LayerNorm without a bias."""
    return F.layer_norm(x, weight.shape, weight)


def draw(tokens, stream, step, count, s):
    """Sequences (count, T + 1) of a step, which depend on the seed, the stream and the step alone."""
    philox = np.random.Philox(key=[s.seed, STREAMS[stream]], counter=[0, 0, 0, step])
    starts = philox.random_raw(count) % np.uint64(len(tokens) - s.block_size)
    windows = [tokens[int(i) : int(i) + s.block_size + 1] for i in starts]
    return torch.from_numpy(np.stack(windows).astype(np.int64))


def rate(step, s):
    """A linear warm-up, then a cosine down to min_lr at lr_decay_iters."""
    if step < s.warmup_iters:
        return s.learning_rate * (step + 1) / (s.warmup_iters + 1)
    decayed = min(1, (step - s.warmup_iters) / (s.lr_decay_iters - s.warmup_iters))
    return s.min_lr + 0.5 * (1 + math.cos(math.pi * decayed)) * (s.learning_rate - s.min_lr)


def orthogonalized(matrix):
    """A matrix whose singular values the polynomials have brought close to 1."""
    u, values, v = torch.linalg.svd(matrix / matrix.norm(), full_matrices=False)
    gram = (u * values**2) @ u.T if matrix.size(0) <= matrix.size(1) else (v.T * values**2) @ v
    values = values / gram.abs().sum(1).max().clamp(max=1).sqrt()  # both bound the largest one
    for a, b, c in POLYNOMIALS:
        values = a * (values / 1.01) + b * (values / 1.01) ** 3 + c * (values / 1.01) ** 5
    return (u * values) @ v


class Muon:
    """Muon (https://kellerjordan.github.io/posts/muon) for matrices of blocks; q, k and v are three."""

    def __init__(self, params, s):
        self.params, self.s = params, s
        self.buffers = [torch.zeros_like(p) for p in params]

    @torch.no_grad()
    def step(self, step):
        momentum = 0.85 + min(1, step / 300) * (self.s.muon_momentum - 0.85)
        lr = self.s.muon_lr * rate(step, self.s) / self.s.learning_rate
        for p, buffer in zip(self.params, self.buffers, strict=True):
            buffer.mul_(momentum).add_(p.grad, alpha=1 - momentum)
            nesterov = momentum * buffer + (1 - momentum) * p.grad
            is_stack = p.size(0) == 3 * p.size(1)
            matrices = nesterov.chunk(3) if is_stack else [nesterov]
            scale = math.sqrt(max(1, matrices[0].size(0) / p.size(1)))
            p.mul_(1 - lr * self.s.weight_decay)
            p.sub_(torch.cat([orthogonalized(m) for m in matrices]), alpha=lr * scale)


class Island:
    """The weights of a worker of DiLoCo and the optimizers that train them; without DiLoCo, of the run."""

    def __init__(self, weights, s):
        copies = {p: p.clone().requires_grad_() for p in weights.values()}  # tied weights are one
        self.weights = {name: copies[p] for name, p in weights.items()}
        self.params = [*copies.values()]
        is_muon = s.optimizer == "muon"
        of_blocks = [p for name, p in self.weights.items() if ".h." in name and p.dim() == 2]
        embeddings = [p for name, p in self.weights.items() if name.endswith(("wte.weight", "wpe.weight"))]
        vectors = [p for p in self.params if p.dim() == 1]
        groups = [{"params": vectors, "weight_decay": 0.0}]
        groups.append({"params": embeddings, "weight_decay": 0.0 if is_muon else s.weight_decay})
        if not is_muon:
            groups.append({"params": of_blocks, "weight_decay": s.weight_decay})
        self.adamw = torch.optim.AdamW(groups, betas=(s.beta1, s.beta2))
        self.muon = Muon(of_blocks if is_muon else [], s)

    def step(self, step, s):
        for group in self.adamw.param_groups:
            group["lr"] = rate(step, s)
        self.adamw.step()
        self.muon.step(step)


def train(train_tokens, val_tokens, **settings):
    """
    Train with train.py's settings; returns the records of steps and evaluations, and the final weights.
    """
    s = SimpleNamespace(**settings)
    weights = initial_weights(s)
    islands = [Island(weights, s) for _ in range(s.islands)]
    outer = Island(weights, s)  # what an evaluation and a checkpoint use
    outer_step = torch.optim.SGD(outer.params, s.outer_lr, s.outer_momentum, nesterov=s.outer_momentum > 0)
    records = []
    for step in range(s.max_iters + 2):
        if step % s.eval_interval == 0 or step > s.max_iters:
            held = outer if s.islands > 1 else islands[0]
            record = {"iter": step}
            for split, tokens in (("train_loss", train_tokens), ("val_loss", val_tokens)):
                with torch.no_grad():
                    sequences = draw(tokens, split, 0, s.eval_iters * s.batch_size, s)
                    record[split] = mean_loss(held.weights, sequences, s).item()
            records.append(record)
        if step > s.max_iters:
            return records, {name: p.detach() for name, p in held.weights.items()}
        count = s.gradient_accumulation_steps * s.batch_size
        parts = draw(train_tokens, "train", step, count, s).chunk(s.islands)
        losses, squares = [], []
        for island, sequences in zip(islands, parts, strict=True):
            loss = mean_loss(island.weights, sequences, s)
            grads = torch.autograd.grad(loss, island.params)
            for p, grad in zip(island.params, grads, strict=True):
                p.grad = grad
            losses.append(loss.item())
            squares.append(sum(grad.square().sum().item() for grad in grads))
        grad_norm = math.sqrt(sum(squares) / len(squares))  # of islands, the root of the mean square
        for island in islands:
            for p in island.params:
                p.grad.div_(max(1.0, (grad_norm + 1e-6) / (s.grad_clip or math.inf)))
            island.step(step, s)
        records.append({"iter": step, "loss": sum(losses) / len(losses), "grad_norm": grad_norm})
        if s.islands > 1 and (step + 1) % s.local_steps == 0:
            # DiLoCo (Douillard et al. 2023, arXiv:2311.08105): the mean change is the outer step's gradient
            with torch.no_grad():
                for p, *inner in zip(outer.params, *(island.params for island in islands), strict=True):
                    p.grad = p - sum(inner) / len(inner)
                outer_step.step()
                for island in islands:
                    for p, weight in zip(outer.params, island.params, strict=True):
                        weight.copy_(p)
