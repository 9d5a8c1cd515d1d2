"""
Accumulate gradients over micro-batches, and count what no_sync saves.

    torchrun --standalone --nproc_per_node=2 lessons/accumulation.py
"""

import os
import time
from collections import Counter
from contextlib import nullcontext
from statistics import median

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

micro_steps = 4  # micro-batches of a step on each rank
layers, width = 6, 512  # matrices of 512 x 512, 1 MiB each; the vocabulary has as many tokens
rows, length = 2, 16  # sequences of a micro-batch, and their tokens

rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo")


def log(text: str) -> None:
    if rank == 0:
        print(text, flush=True)


# 1. A model whose size is easy to compute with, and the tokens of one step.
torch.manual_seed(1)  # the same weights and tokens on all ranks
modules = [nn.Embedding(width, width)]
for _ in range(layers - 1):
    modules += [nn.Linear(width, width, bias=False), nn.GELU()]
model = nn.Sequential(*modules[:-1])  # the last matrix computes the logits
tokens = torch.randint(width, (world_size * micro_steps * rows, length + 1))
inputs, targets = tokens[:, :-1], tokens[:, 1:]

# one process, the whole batch in one pass: what the step should compute
F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).backward()
expected = [weight.grad.clone() for weight in model.parameters()]

# 2. DDP, with a hook that counts: DDP calls it for each bucket, instead of its own all-reduce. Each matrix
# fills a bucket of 1 MiB, and each bucket is one all-reduce.
counts = Counter()


def counting_hook(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """What DDP does without a hook, after counting it."""
    counts["all-reduces"] += 1
    counts["bytes"] += bucket.buffer().nbytes
    return allreduce_hook(group, bucket)


ddp_model = DistributedDataParallel(model, bucket_cap_mb=1)
ddp_model.register_comm_hook(dist.group.WORLD, counting_hook)


def accumulate(uses_no_sync: bool) -> float:
    """Leave the gradient of a step's batch in the parameters; returns the seconds that it took."""
    model.zero_grad()
    dist.barrier()
    started = time.perf_counter()
    micro_batches = list(zip(inputs.split(rows), targets.split(rows), strict=True))
    for micro_step, (x, y) in enumerate(micro_batches[rank::world_size]):
        is_last = micro_step == micro_steps - 1
        with ddp_model.no_sync() if uses_no_sync and not is_last else nullcontext():
            loss = F.cross_entropy(ddp_model(x).flatten(0, 1), y.flatten())
            (loss / micro_steps).backward()  # the gradients are added, and the step needs their mean
    return time.perf_counter() - started


log(f"{world_size} ranks, {micro_steps} micro-batches each, {layers} matrices of {width} x {width}, float32")
log(f"{'gradients are reduced in':27} all-reduces: predicted counted   MB: predicted counted   error < 1e-5")
accumulate(True)  # DDP arranges its buckets after the first pass
largest = max(grad.abs().max().item() for grad in expected)
for name, calls in (("every micro-batch", layers * micro_steps), ("the last one (no_sync)", layers)):
    counts.clear()
    accumulate(uses_no_sync="no_sync" in name)
    grads = [weight.grad for weight in model.parameters()]
    errors = [(grad - e).abs().max().item() for grad, e in zip(grads, expected, strict=True)]
    megabytes = calls * 4 * width**2 / 1e6
    counted = f"{calls:22} {counts['all-reduces']:7} {megabytes:15.2f} {counts['bytes'] / 1e6:7.2f}"
    log(f"  {name:25} {counted}   {max(errors) / largest < 1e-5}")
times = [(accumulate(False), accumulate(True)) for _ in range(7)]  # in turn, since other programs disturb
always, once = (1e3 * median(column) for column in zip(*times, strict=True))
log(f"measured: the passes of a step take {always:.0f} ms, and {once:.0f} ms with no_sync")

# 3. What this saves on a network. How often an all-reduce sends each byte is for lesson 3; here it is once.
gradient_bytes = 4 * 124e6  # GPT-2 124M, float32
log(f"{'seconds to send 496 MB (GPT-2 124M)':42} every micro-batch   no_sync")
for gigabits in (1, 10, 100):
    seconds = gradient_bytes / (gigabits * 1e9 / 8)
    log(f"  {f'{gigabits} Gbit/s':40} {micro_steps * seconds:17.3f} {seconds:9.3f}")

# 4. The division. The model is two logits, which are 0, so that the gradient of b's is 1 / 2 minus the share
# of b. All micro-batches consist of 64 tokens "a", except the last one, which consists of 8 tokens "b".
shares = DistributedDataParallel(nn.Linear(1, 2, bias=False))
nn.init.zeros_(shares.module.weight)
micro_batches = world_size * micro_steps
texts = [torch.zeros(64, dtype=torch.long)] * (micro_batches - 1) + [torch.ones(8, dtype=torch.long)]
mine = texts[rank::world_size]
last_rank_tokens = 64 * (micro_steps - 1) + 8
all_tokens = 64 * (micro_batches - 1) + 8


def gradient_of_b(divisors: list[float]) -> float:
    """The gradient of b's logit, where each micro-batch's sum of losses is divided by a number."""
    shares.zero_grad()
    for micro_step, (text, divisor) in enumerate(zip(mine, divisors, strict=True)):
        with shares.no_sync() if micro_step < micro_steps - 1 else nullcontext():
            logits = shares(torch.ones(len(text), 1))
            (F.cross_entropy(logits, text, reduction="sum") / divisor).backward()
    return shares.module.weight.grad[1].item()


sizes = [len(text) for text in mine]
rules = {
    "tokens of the micro-batch": (sizes, micro_steps * (1 / 2 - 1 / micro_batches)),
    "the same, times micro-batches": ([micro_steps * size for size in sizes], 1 / 2 - 1 / micro_batches),
    "tokens of the rank": ([sum(sizes)] * micro_steps, 1 / 2 - 8 / last_rank_tokens / world_size),
    "tokens of all ranks / ranks": ([all_tokens / world_size] * micro_steps, 1 / 2 - 8 / all_tokens),
}
log(f"{'a sum of losses is divided by':42} {'predicted':>17} {'computed':>9}   gradient of b's logit")
for name, (divisors, predicted) in rules.items():
    log(f"  {name:40} {predicted:17.4f} {gradient_of_b(divisors):9.4f}")
dist.destroy_process_group()
