"""
Train GPT-2 with PyTorch alone, on one process or many.

    python lessons/minimal.py   # after python data/stdlib_char/prepare.py
    torchrun --standalone --nproc_per_node=2 lessons/minimal.py

The settings are train.py's, and `--name=value` overrides them. With the same settings, train.py prints the
same losses, because it draws the first weights and the sequences of each step in the same way.
"""

import ast
import hashlib
import math
import os
import pickle
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

out_dir = "out-minimal"
init_from = "scratch"  # or resume, which continues from the last checkpoint
dataset = "stdlib_char"
seed = 1337
device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = "float32"  # float32, bfloat16 or float16
max_iters = 50
eval_interval = 25
eval_iters = 5  # micro-batches of an evaluation
gradient_accumulation_steps = 4  # micro-batches of a step, over all ranks
batch_size = 3  # sequences of a micro-batch
block_size = 64
n_layer, n_head, n_embd = 2, 2, 64
learning_rate, min_lr, warmup_iters = 1e-3, 1e-4, 10
weight_decay, beta1, beta2, grad_clip = 0.1, 0.9, 0.99, 1.0
for argument in sys.argv[1:]:
    name, _, value = argument.removeprefix("--").partition("=")
    if name not in globals():
        raise SystemExit(f"{argument}: no such setting; the settings are at the top of {__file__}")
    globals()[name] = value if isinstance(globals()[name], str) else ast.literal_eval(value)


# 1. The model: GPT-2 with nanoGPT's names, without biases and dropout.
class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_attn = nn.Linear(n_embd, 3 * n_embd, bias=False)  # queries, keys and values
        self.c_proj = nn.Linear(n_embd, n_embd, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        heads = self.c_attn(x).view(B, T, 3 * n_head, C // n_head).transpose(1, 2)  # (B, 3 H, T, D)
        q, k, v = heads.split(n_head, dim=1)  # (B, H, T, D) each
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).flatten(2))  # (B, T, C)


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_fc = nn.Linear(n_embd, 4 * n_embd, bias=False)
        self.c_proj = nn.Linear(4 * n_embd, n_embd, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(F.gelu(self.c_fc(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(n_embd, bias=False), Attention()
        self.ln_2, self.mlp = nn.LayerNorm(n_embd, bias=False), MLP()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        parts = {
            "wte": nn.Embedding(vocab_size, n_embd),
            "wpe": nn.Embedding(block_size, n_embd),
            "h": nn.ModuleList(Block() for _ in range(n_layer)),
            "ln_f": nn.LayerNorm(n_embd, bias=False),
        }
        self.transformer = nn.ModuleDict(parts)
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)
        self.lm_head.weight = self.transformer.wte.weight  # one matrix at both ends

    def forward(self, x: Tensor, y: Tensor, divisor: float) -> Tensor:
        """The cross-entropy of all targets y (B, T), summed and divided by `divisor`."""
        h = self.transformer.wte(x) + self.transformer.wpe(torch.arange(x.size(1), device=x.device))
        for block in self.transformer.h:
            h = block(h)  # (B, T, C)
        logits = self.lm_head(self.transformer.ln_f(h))  # (B, T, V)
        return F.cross_entropy(logits.flatten(0, 1).float(), y.flatten(), reduction="sum") / divisor


@torch.no_grad()
def init_weights(model: nn.Module) -> None:
    """
    Draw the matrices from normal distributions (Box and Muller 1958). The numbers depend only on the seed
    and the parameter's name, so that all ranks begin with the same weights on any device.
    """
    for name, p in model.named_parameters():
        if p.dim() < 2:
            continue  # LayerNorm's weights are 1
        key = int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:16], "little")
        words = np.random.Philox(key=key).random_raw(p.numel() // 2 + 1)
        uniform = words.view(np.uint32).reshape(-1, 2).T.astype(np.float32, order="C") * 2.0**-32
        radius = np.sqrt(-2.0 * np.log(uniform[0] + 2.0**-33))
        angle = 2.0 * np.pi * uniform[1]
        normal = np.stack((radius * np.cos(angle), radius * np.sin(angle)), axis=-1).ravel()[: p.numel()]
        # each block adds two matrices' outputs to the residual stream, whose variance they keep together
        std = 0.02 / math.sqrt(2 * n_layer) if name.endswith("c_proj.weight") else 0.02
        p.copy_(torch.from_numpy(normal).view(p.shape).mul_(std))


# 2. The processes: torchrun starts them and sets these variables.
rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
if world_size > 1:
    if device == "cuda":
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.startswith("cuda") else "gloo")
if gradient_accumulation_steps % world_size:
    raise SystemExit(f"gradient_accumulation_steps must be a multiple of the number of ranks, {world_size}")


def sum_over_ranks(number: Tensor) -> float:
    if world_size > 1:
        dist.all_reduce(number)
    return number.item()


def log(text: str) -> None:
    if rank == 0:
        print(text, flush=True)


# 3. The data: which sequences a step reads depends on the seed and the step, not on the number of ranks.
folder = Path(__file__).parent.parent / "data" / dataset
vocab_size = pickle.loads((folder / "meta.pkl").read_bytes())["vocab_size"]
streams = {"train": 0, "val": 2}  # of random numbers; train.py draws its estimate of the training loss from 1


def micro_batch(split: str, step: int, number: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets (B, T) of micro-batch `number` of a step."""
    tokens = np.memmap(folder / f"{split}.bin", dtype=np.uint16, mode="r")
    generator = np.random.Philox(key=[seed, streams[split]], counter=[0, 0, 0, step])
    starts = generator.random_raw((number + 1) * batch_size) % np.uint64(len(tokens) - block_size)
    windows = [tokens[int(i) : int(i) + block_size + 1] for i in starts[-batch_size:]]
    sequences = torch.from_numpy(np.stack(windows).astype(np.int64)).to(device)  # (B, T + 1)
    return sequences[:, :-1], sequences[:, 1:]


# 4. Model, optimizer and scaler, new or from a checkpoint.
model = GPT(vocab_size)
init_weights(model)
model.to(device)
matrices = [p for p in model.parameters() if p.dim() >= 2]
vectors = [p for p in model.parameters() if p.dim() < 2]
groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, betas=(beta1, beta2), fused=True)
scaler = torch.amp.GradScaler(torch.device(device).type, enabled=dtype == "float16")  # else it does nothing
autocast = torch.autocast(torch.device(device).type, getattr(torch, dtype), enabled=dtype != "float32")
stateful = {"model": model, "optimizer": optimizer, "scaler": scaler}
checkpoint_file = Path(out_dir) / "ckpt.pt"
first_step = 0
if init_from == "resume":
    checkpoint = torch.load(checkpoint_file, map_location=device, weights_only=True)
    for name, part in stateful.items():
        part.load_state_dict(checkpoint[name])
    first_step = checkpoint["step"]
ddp_model = DistributedDataParallel(model) if world_size > 1 else model


def save(step: int) -> None:
    """Write the state before `step`. If the process is killed meanwhile, the old file is still complete."""
    if rank == 0:
        checkpoint_file.parent.mkdir(exist_ok=True)
        temporary = checkpoint_file.with_suffix(".tmp")
        torch.save({name: part.state_dict() for name, part in stateful.items()} | {"step": step}, temporary)
        os.replace(temporary, checkpoint_file)


@torch.no_grad()
def evaluate() -> float:
    """The mean loss over sequences of val, which are always the same ones; the ranks share the work."""
    total = torch.zeros((), device=device)
    for number in range(rank, eval_iters, world_size):
        with autocast:
            total += model(*micro_batch("val", 0, number), eval_iters * batch_size * block_size)
    return sum_over_ranks(total)


def learning_rate_of(step: int) -> float:
    """A linear warm-up, then a cosine down to min_lr."""
    if step < warmup_iters:
        return learning_rate * (step + 1) / (warmup_iters + 1)
    progress = min(1.0, (step - warmup_iters) / (max_iters - warmup_iters))
    return min_lr + 0.5 * (1 + math.cos(math.pi * progress)) * (learning_rate - min_lr)


# 5. The loop.
micro_steps = gradient_accumulation_steps // world_size  # of this rank
share = micro_steps * batch_size * block_size  # tokens of a step that this rank reads
for step in range(first_step, max_iters + 1):
    if step % eval_interval == 0:
        log(f"step {step}: val loss {evaluate():.9g}")
        save(step)
    started = time.perf_counter()
    for group in optimizer.param_groups:
        group["lr"] = learning_rate_of(step)

    loss_sum = torch.zeros((), device=device)
    for micro_step in range(micro_steps):
        x, y = micro_batch("train", step, micro_step * world_size + rank)
        # DDP averages the gradients over the ranks during a backward pass; once for each step is enough
        accumulates = world_size > 1 and micro_step < micro_steps - 1
        with ddp_model.no_sync() if accumulates else nullcontext():
            with autocast:
                loss = ddp_model(x, y, share)
            scaler.scale(loss).backward()
        loss_sum += loss.detach() / world_size

    scaler.unscale_(optimizer)
    norm = torch.stack([p.grad.norm().double() for p in model.parameters()]).norm().item()
    for p in model.parameters():
        p.grad.div_(max(1.0, (norm + 1e-6) / grad_clip))
    scaler.step(optimizer)  # with float16, only if all gradients are finite
    scaler.update()
    optimizer.zero_grad(set_to_none=True)

    mean_loss = sum_over_ranks(loss_sum)  # of the whole batch, not of rank 0's share
    log(f"step {step}: loss {mean_loss:.9g}, {1e3 * (time.perf_counter() - started):.0f} ms")
    if not math.isfinite(mean_loss):  # all ranks have the same number, so all of them stop
        raise SystemExit(f"the loss of step {step} is {mean_loss}")
save(max_iters + 1)
if world_size > 1:
    dist.destroy_process_group()
