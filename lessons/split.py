"""
Divide a model over ranks in three ways: its matrices (tensor parallelism), its layers (a pipeline) and its
sequences (context parallelism). Each result is compared with that of the whole model on one process.

    torchrun --standalone --nproc_per_node=4 lessons/split.py [--picture=lessons/split.png]
"""

import argparse
import copy
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--micro_batches", type=int, default=8, help="of the pipeline")
parser.add_argument("--slot", type=float, default=0.05, help="seconds of a forward pass of the pipeline")
parser.add_argument("--picture", help="write three images, whose names begin like this one")
options = parser.parse_args()
B, T, H, C = 2, 256, 4, 64  # sequences, positions, heads, features
torch.manual_seed(1337)  # all ranks draw the same numbers, so that each can compute the whole for comparison
dist.init_process_group("gloo")
rank, p, m = dist.get_rank(), dist.get_world_size(), options.micro_batches


def log(text: str) -> None:
    if rank == 0:
        print(text, flush=True)


def of_all_ranks(mine: object) -> list:
    everyone = [None] * p
    dist.all_gather_object(everyone, mine)
    return everyone


def is_equal(*pairs: tuple[Tensor, Tensor]) -> bool:
    """Whether the tensors of each pair differ by less than 1e-5 of the largest number, on all ranks."""
    return all(of_all_ranks(all((a - b).abs().max() < 1e-5 * b.abs().max() for a, b in pairs)))


# 1. Tensor parallelism: each rank holds some of the MLP's hidden features.
all_reduces = []


class AllReduce(torch.autograd.Function):
    """Sum x over the ranks in the forward pass, or its gradient in the backward pass; else the identity."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, direction: str) -> Tensor:
        ctx.direction = direction
        return AllReduce.sum(x, direction) if direction == "forward" else x.view_as(x)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        return AllReduce.sum(grad, "backward") if ctx.direction == "backward" else grad, None

    @staticmethod
    def sum(x: Tensor, direction: str) -> Tensor:
        all_reduces.append(direction)
        total = x.clone()
        dist.all_reduce(total)
        return total


c_fc = torch.randn(4 * C, C).div(8).requires_grad_()  # weights have the shape (out, in), as in nn.Linear
c_proj = torch.randn(C, 4 * C).div(16).requires_grad_()
x, y_grad = torch.randn(B, T, C, requires_grad=True), torch.randn(B, T, C)
y = F.linear(F.gelu(F.linear(x, c_fc)), c_proj)
y.backward(y_grad)
fc_part = c_fc.detach().chunk(p, 0)[rank].clone().requires_grad_()  # some columns of the matrix c_fc.T
proj_part = c_proj.detach().chunk(p, 1)[rank].clone().requires_grad_()  # some rows of the matrix c_proj.T
x_here = x.detach().clone().requires_grad_()
hidden = F.gelu(F.linear(AllReduce.apply(x_here, "backward"), fc_part))  # (B, T, 4 C / p)
y_here = AllReduce.apply(F.linear(hidden, proj_part), "forward")
y_here.backward(y_grad)
of_whole_mlp = (y, x.grad, c_fc.grad.chunk(p, 0)[rank], c_proj.grad.chunk(p, 1)[rank])
here = (y_here, x_here.grad, fc_part.grad, proj_part.grad)
log(f"1. Tensor parallelism: an MLP {C} -> {4 * C} -> {C} on {p} ranks")
log(f"weights of a rank: {fc_part.numel() + proj_part.numel()} of {c_fc.numel() + c_proj.numel()}")
log("all-reduces: " + " ".join(all_reduces))
log(f"output and gradients are those of one process: {is_equal(*zip(here, of_whole_mlp, strict=True))}")

# 2. A pipeline: each rank holds one stage, and the micro-batches pass through all of them.
SLOTS = {"forward": 1, "backward": 2}  # a backward pass has twice as many matrix products
AHEAD = {"forward": 1, "backward": -1}  # from a stage to the one that reads its result


def passes_of(schedule: str, stage: int) -> list[tuple[str, int]]:
    """The passes of a stage in order, each with the number of its micro-batch."""
    first = m if schedule == "GPipe" else min(p - 1 - stage, m)  # forward passes before the two alternate
    passes = [("forward", i) for i in range(first)]
    for i in range(m):
        if first + i < m:
            passes.append(("forward", first + i))
        passes.append(("backward", i))
    return passes


def ideal(schedule: str) -> list[list[tuple]]:
    """For each stage, its passes as (direction, micro-batch, start, length), in slots."""
    waiting = [passes_of(schedule, stage) for stage in range(p)]
    timeline: list[list[tuple]] = [[] for _ in range(p)]
    ends = {}  # {(direction, micro-batch, stage): the slot in which it ends}
    while any(waiting):
        for stage in range(p):
            direction, i = waiting[stage][0] if waiting[stage] else (None, None)
            source = stage - AHEAD.get(direction, 0)
            if direction is None or (0 <= source < p and (direction, i, source) not in ends):
                continue  # the input has not been computed yet: look again in the next round
            free = sum(timeline[stage][-1][2:]) if timeline[stage] else 0  # when the pass before it ends
            start = max(free, ends.get((direction, i, source), 0))
            ends[direction, i, stage] = start + SLOTS[direction]
            timeline[stage].append((direction, i, start, SLOTS[direction]))
            waiting[stage].pop(0)
    return timeline


def run(schedule: str, stage: nn.Module) -> tuple[list[tuple], int]:
    """This rank's passes as in `ideal`, but in seconds, and the most micro-batches whose graphs it kept."""
    done, kept, most, sent = [], {}, 0, []
    dist.barrier()
    began = time.perf_counter()
    for direction, i in passes_of(schedule, rank):
        source, target = rank - AHEAD[direction], rank + AHEAD[direction]
        arrived = batches[i].clone()
        if 0 <= source < p:
            dist.recv(arrived, source)
        start = time.perf_counter()
        if direction == "forward":
            output = stage(arrived.requires_grad_())
            kept[i] = arrived, output if rank < p - 1 else output.square().mean() / m  # the loss
            most = max(most, len(kept))
        else:
            inputs, output = kept.pop(i)
            output.backward(arrived if rank < p - 1 else None)
        # stands for a GPU's work: p processes that compute on fewer cores would take turns
        time.sleep(max(0.0, start + options.slot * SLOTS[direction] - time.perf_counter()))
        done.append((direction, i, start - began, time.perf_counter() - start))
        if 0 <= target < p:
            result = output.detach() if direction == "forward" else inputs.grad
            # send would wait for the neighbor's recv, but the neighbor may itself be sending to this rank
            sent.append((dist.isend(result, target), result))
    for work, _ in sent:
        work.wait()
    return done, most


def bubble(timeline: list[list[tuple]]) -> tuple[float, float]:
    """The end of the last pass, and the mean share of the time until then in which a stage does nothing."""
    end = max(start + length for stage in timeline for _, _, start, length in stage)
    return end, 1 - sum(length for stage in timeline for *_, length in stage) / (end * p)


stages = [nn.Sequential(nn.Linear(C, 4 * C), nn.GELU(), nn.Linear(4 * C, C)) for _ in range(p)]
batches = torch.randn(m, B, T, C)
for micro_batch in batches:
    (nn.Sequential(*stages)(micro_batch).square().mean() / m).backward()
log(f"2. Pipeline: {p} stages, {m} micro-batches; predicted bubble {(p - 1) / (m + p - 1):.3f}")
log("schedule  slots  bubble  micro-batches kept  gradients are those of one process")
timelines = {}
for schedule in ("GPipe", "1F1B"):
    stage = copy.deepcopy(stages[rank])
    stage.zero_grad()
    done, most = run(schedule, stage)
    timelines[schedule, "ideal"], timelines[schedule, "measured"] = ideal(schedule), of_all_ranks(done)
    end, idle = bubble(timelines[schedule, "ideal"])
    seconds, idle_here = bubble(timelines[schedule, "measured"])
    pairs = zip(stage.parameters(), stages[rank].parameters(), strict=True)
    equal = is_equal(*((a.grad, b.grad) for a, b in pairs))
    log(f"{schedule:8}  {end:5}  {idle:6.3f}  {str(of_all_ranks(most)):18}  {equal}")
    log(f"measured: bubble {idle_here:.3f}, {seconds:.2f} s; {end} slots are {end * options.slot:.2f} s")

# 3. Context parallelism: each rank holds some positions of each sequence.
q, k, v = torch.randn(3, B, H, T, C // H)  # (B, H, T, D) each


def ring_attention(held: list[Tensor]) -> tuple[Tensor, int]:
    """
    Causal attention of this rank's queries, while the keys and values pass from rank to rank; `held` are the
    positions of each rank, (T / p,). Returns (B, H, T / p, D), and how many pairs of a query and a key
    it sees.
    """
    mine, pairs = held[rank], 0
    y, logsumexp = torch.zeros(B, H, len(mine), C // H), torch.full((B, H, len(mine), 1), -torch.inf)
    block = torch.stack((k, v))[..., mine, :]  # (2, B, H, T / p, D)
    for step in range(p):
        visible = mine[:, None] >= held[(rank - step) % p]  # whose keys and values are here now
        pairs += visible.sum().item()
        if visible.any():
            scores = q[:, :, mine] @ block[0].transpose(-1, -2) / (C // H) ** 0.5
            scores = scores.masked_fill(~visible, -torch.inf)
            # the softmax's divisor grows, which makes what was added before smaller
            merged = torch.logaddexp(logsumexp, scores.logsumexp(-1, keepdim=True))
            y = y * (logsumexp - merged).exp() + (scores - merged).exp() @ block[1]
            logsumexp = merged
        if step < p - 1:
            sent, block = block, torch.empty_like(block)
            sending = dist.isend(sent, (rank + 1) % p)
            dist.recv(block, (rank - 1) % p)
            sending.wait()
    return y, pairs


chunks = torch.arange(T).chunk(2 * p)
in_order = torch.arange(T).chunk(p)
zigzag = [torch.cat((chunks[r], chunks[2 * p - 1 - r])) for r in range(p)]
layouts = {"in order": (in_order, [(2 * r + 1) / p**2 for r in range(p)]), "zigzag": (zigzag, [1 / p] * p)}
whole_attention = F.scaled_dot_product_attention(q, k, v, is_causal=True)
log(f"3. Context parallelism: {T} positions; share of the work on each of {p} ranks")
log(f"{'positions':9}  {'predicted':23}  {'counted':23}  attention is that of one process")
for layout, (held, predicted) in layouts.items():
    attention, pairs = ring_attention(held)
    counted = [n / (T * (T + 1) / 2) for n in of_all_ranks(pairs)]
    texts = [" ".join(f"{share:.3f}" for share in shares) for shares in (predicted, counted)]
    log(f"{layout:9}  {texts[0]}  {texts[1]}  {is_equal((attention, whole_attention[:, :, held[rank]]))}")

if options.picture and rank == 0:
    from split_picture import draw

    draw(options.picture, timelines, options.slot, in_order, zigzag)
dist.destroy_process_group()
