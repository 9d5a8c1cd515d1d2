"""
DistributedDataParallel (DDP): a step by hand, buckets, overlap, and the speed of two processes.

    torchrun --standalone --nproc_per_node=2 lessons/ddp.py [--picture=lessons/ddp.png]
"""

import sys
import time
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import parameters_to_vector

width, vocab_size, tokens = 512, 256, 256  # tokens of a step, over all ranks
MIB = 2**20
torch.set_num_threads(1)  # the same for one process and for each of two
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()


def log(text: str) -> None:
    if rank == 0:
        print(text, flush=True)


def make_model() -> nn.Sequential:
    """GPT-2's MLPs without attention, which predict a token from the one before it."""
    layers = [nn.Embedding(vocab_size, width)]
    for _ in range(4):
        layers += [
            nn.Linear(width, 4 * width, bias=False),
            nn.GELU(),
            nn.Linear(4 * width, width, bias=False),
        ]
    return nn.Sequential(*layers, nn.Linear(width, vocab_size, bias=False))


def forward_backward(model: nn.Module, part: slice = slice(None)) -> None:
    model.zero_grad()
    F.cross_entropy(model(x[part]), y[part]).backward()


# 1. By hand: each rank computes the gradient of its part of the batch, then the ranks average all gradients.
torch.manual_seed(1)  # the same weights and data on all ranks
model = make_model()
x, y = torch.randint(vocab_size, (2, tokens))
my_part = slice(rank * tokens // world_size, (rank + 1) * tokens // world_size)
forward_backward(model)
whole = parameters_to_vector(weight.grad for weight in model.parameters())


def log_difference(name: str) -> None:
    """Compare the gradient with the whole batch's, by the norm of their difference."""
    grads = parameters_to_vector(weight.grad for weight in model.parameters())
    log(f"{name:<28} {(grads - whole).norm() / whole.norm():.3f}")


log("gradient of                  differs from one process's by")
forward_backward(model, my_part)
log_difference("rank 0's half, not averaged")
for weight in model.parameters():
    dist.all_reduce(weight.grad)
    weight.grad /= world_size
log_difference("both, averaged by hand")

# 2. DDP does the same. First, it broadcasts rank 0's weights, so that all ranks begin with the same.
if rank > 0:
    nn.init.zeros_(model[0].weight)
forward_backward(DDP(model), my_part)
log_difference("both, with DDP")


# 3. Buckets: DDP reduces several gradients in one collective.
def predict_buckets(sizes: list[int], cap: int, first_cap: int) -> list[int]:
    """Fill a bucket with gradients, last layers first, until its size is the cap or more."""
    buckets = [0]
    for size in sizes:
        if buckets[-1] >= (cap if len(buckets) > 1 else first_cap):
            buckets.append(0)
        buckets[-1] += size
    return buckets


def average(timeline: list[dict], bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """What DDP does with a full bucket, and a row of the timeline."""
    row = {"params": bucket.parameters(), "bytes": bucket.buffer().nbytes, "sent": time.perf_counter()}
    timeline.append(row)

    def finish(future: torch.futures.Future) -> Tensor:
        row["reduced"] = time.perf_counter()
        return future.value()[0]

    return dist.all_reduce(bucket.buffer().div_(world_size), async_op=True).get_future().then(finish)


timeline: list[dict] = []
log("\nbucket_cap_mb     MiB of each bucket, in the order in which they are reduced")
for cap in (None, 8):
    model = make_model()
    ddp_model = DDP(model, bucket_cap_mb=cap)
    ddp_model.register_comm_hook(timeline, average)
    sizes = [weight.nbytes for weight in reversed(list(model.parameters()))]
    # the first bucket is smaller, so that communication begins soon, unless the cap is set
    rows = {"predicted": predict_buckets(sizes, (cap or 25) * MIB, (cap or 1) * MIB)}
    for step in (1, 2):
        timeline.clear()
        forward_backward(ddp_model, my_part)
        rows[f"step {step}"] = [row["bytes"] for row in timeline]
    for name, buckets in rows.items():
        log(f"{cap or 'default':<8}{name:<10}{''.join(f'{size / MIB:5.1f}' for size in buckets)}")

# 4. Overlap: the timeline of rank 0's next backward pass, in ms. The last bucket is sent at its end.
timeline.clear()
loss = F.cross_entropy(ddp_model(x[my_part]), y[my_part])
dist.barrier()
begin = time.perf_counter()
loss.backward()
sent, reduced = ([1e3 * (row[event] - begin) for row in timeline] for event in ("sent", "reduced"))
names = {weight: name.removesuffix(".weight") for name, weight in model.named_parameters()}
layers = [" ".join(names[weight] for weight in row["params"]) for row in timeline]
log("\nlayers of each bucket: " + " | ".join(layers))
for event, times in {"sent": sent, "reduced": reduced}.items():
    log(f"measured: {event:<8}{' '.join(f'{ms:5.0f}' for ms in times)} ms after the backward pass began")
if rank == 0 and sys.argv[1:]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 2.5), dpi=110, layout="constrained")
    axes = figure.subplots()
    colors = [f"C{i}" for i in range(len(sent))]
    axes.barh([0] * len(sent), np.diff(sent, prepend=0), left=[0, *sent[:-1]], color=colors)
    axes.barh(range(1, len(sent) + 1), np.subtract(reduced, sent), left=sent, color=colors)
    rows = ["backward pass", *(f"all-reduce of bucket {i + 1}" for i in range(len(sent)))]
    axes.set_yticks(range(len(rows)), rows)
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    figure.savefig(sys.argv[1].removeprefix("--picture="))

# 5. Speed: the parts of a step, and the whole step, on one process while the other waits, and on both.
alone = make_model()
forward_backward(alone)
optimizer = torch.optim.AdamW(alone.parameters(), fused=True)
ddp_optimizer = torch.optim.AdamW(ddp_model.parameters(), fused=True)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, part: slice = slice(None)) -> None:
    forward_backward(model, part)
    optimizer.step()


# how many ranks call a function at the same time, and its arguments
calls: dict[str, tuple[int, Callable, tuple]] = {
    "alone: whole batch": (1, forward_backward, (alone,)),
    "alone: half the batch": (1, forward_backward, (alone, my_part)),
    "alone: update": (1, optimizer.step, ()),
    "alone: whole step": (1, train_step, (alone, optimizer)),
    "both: half each, not averaged": (world_size, forward_backward, (alone, my_part)),
    "both: half each, DDP": (world_size, forward_backward, (ddp_model, my_part)),
    "both: the same update": (world_size, optimizer.step, ()),
    "both: whole step, DDP": (world_size, train_step, (ddp_model, ddp_optimizer, my_part)),
    "both: only an all-reduce": (world_size, dist.all_reduce, (torch.zeros(sum(sizes) // 4),)),
}
times: dict[str, list[float]] = {name: [] for name in calls}
for _ in range(10):  # in turn, since other programs disturb
    for name, (ranks, function, args) in calls.items():
        dist.barrier()
        started = time.perf_counter()
        if rank < ranks:
            function(*args)
        times[name].append(time.perf_counter() - started)
log("\nthe shortest of ten times")
for name, seconds in times.items():
    log(f"measured: {name:<32}{1e3 * min(seconds):5.0f} ms")

passes, half, update, one_step, shared, ddp, both_update, two_step, _ = map(min, times.values())
one, two = passes + update, ddp + both_update
log("\nthe parts of a step with DDP, relative to a process that is alone")
log(f"measured: half the batch alone   {half / one:5.0%}")
log(f"measured: sharing the machine   {(shared - half) / one:+6.0%}")
log(f"measured: averaging gradients   {(ddp - shared) / one:+6.0%}")
log(f"measured: update                {both_update / one:+6.0%}")
log(f"measured: in all                 {two / one:5.0%}, so the predicted factor is {one / two:.2f}")
log(f"measured: by Amdahl's law, at most {one / (passes / world_size + update):.2f}")
speeds = f"{tokens / one_step:.0f} and {tokens / two_step:.0f} tokens/s"
log(f"measured: whole steps compute {speeds}, a factor of {one_step / two_step:.2f}")
dist.destroy_process_group()
