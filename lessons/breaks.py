"""
Break the training of two ranks on purpose, and print how each failure looks.

    python lessons/breaks.py

Each run takes two new processes, because some do not survive it. A row contains a run's numbers by step.
"""

import math
import multiprocessing
import os
import signal
import time
import zlib
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 6
TIMEOUT = timedelta(seconds=5)  # of a collective; by default, gloo waits for 30 minutes, and NCCL for 10


def run_two_ranks(function: Callable, *settings: object) -> Tensor:
    """Call function(rank, losses, *settings) in two processes; returns the losses (rank, step)."""
    losses = torch.full((2, STEPS), -1.0).share_memory_()  # outlives the processes; -1: not reached
    fork = multiprocessing.get_context("fork")  # its processes need not import torch again
    with TemporaryDirectory() as folder:
        arguments = (f"file://{folder}/store", function, losses, *settings)
        ranks = [fork.Process(target=run_rank, args=(rank, *arguments)) for rank in range(2)]
        for process in ranks:
            process.start()
        ranks[0].join()
        ranks[1].kill()  # if it still waits for something, or sleeps, as at the end of two of the functions
        ranks[1].join()
    return losses


def run_rank(rank: int, store: str, function: Callable, losses: Tensor, *settings: object) -> None:
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=TIMEOUT)
    started = time.perf_counter()
    try:
        function(rank, losses, *settings)
    except RuntimeError as error:
        if rank == 0:
            text = str(error).splitlines()[0].split("] ", 1)[-1][:76]  # without the file and line of gloo
            print(f"measured: rank 0, {time.perf_counter() - started:.2f} s: {text}", flush=True)


def new_model(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(2 * step + rank))
    return x, torch.tanh(x.sum(dim=1, keepdim=True))


def on_all_ranks(value: object) -> list:
    values = [None, None]
    dist.all_gather_object(values, value)
    return values


def print_row(name: str, values: list) -> None:
    cells = [f"{value:.3f}" if isinstance(value, float) else str(value) for value in values]
    print(f"{name:34}" + "".join(f"{'-' if cell == '-1.000' else cell:>8}" for cell in cells), flush=True)


# 1. Rank 1 reads a NaN in step 2.
def read_nan(rank: int, losses: Tensor, policy: str) -> None:
    model, optimizer = new_model()
    ddp_model = DistributedDataParallel(model)
    scaler = torch.amp.GradScaler("cpu", enabled=policy == "GradScaler")
    for step in range(STEPS):
        x, y = batch(step, rank)
        if step == 2 and rank == 1:
            x[0] = math.nan
        loss = F.mse_loss(ddp_model(x), y)
        losses[rank, step] = loss.detach()
        is_bad = (~loss.isfinite()).int()
        if policy == "all decide":
            dist.all_reduce(is_bad, dist.ReduceOp.MAX)
        if policy in ("each decides", "all decide") and is_bad:
            continue  # before the backward pass, in which DDP averages the gradients
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)  # only if all gradients are finite
        scaler.update()
    if policy == "each decides":
        # Rank 1 has finished, but its connections must stay open: rank 0 would see at once that they close.
        # So it sleeps until rank 0 has reached the timeout, and is then killed in run_two_ranks.
        time.sleep(60)


# 2. Rank 1 is killed in step 3.
def be_killed(rank: int, losses: Tensor, checkpoint: Path, dies: bool, resumes: bool) -> None:
    model, optimizer = new_model()
    first_step = 0
    if resumes:
        model_state, optimizer_state, first_step = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(model_state)
        optimizer.load_state_dict(optimizer_state)
    ddp_model = DistributedDataParallel(model)
    for step in range(first_step, STEPS):
        if rank == 0 and step % 2 == 0:
            torch.save((model.state_dict(), optimizer.state_dict(), step), checkpoint)
        if rank == 1 and step == 3 and dies:
            os.kill(os.getpid(), signal.SIGKILL)
        x, y = batch(step, rank)
        loss = F.mse_loss(ddp_model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses[rank, step] = loss.detach()


# 3. The all-reduce is forgotten: the model is called without DDP, whose hooks would average the gradients.
def forget(rank: int, losses: Tensor, calls_ddp: bool) -> None:
    model, optimizer = new_model()
    ddp_model = DistributedDataParallel(model)
    distances, are_equal = [], []
    for step in range(STEPS):
        x, y = batch(step, rank)
        loss = F.mse_loss(ddp_model(x) if calls_ddp else model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses[rank, step] = loss.detach()
        weights = nn.utils.parameters_to_vector(model.parameters()).detach()
        distances.append(torch.dist(*on_all_ranks(weights)).item())
        checksums = on_all_ranks(zlib.crc32(weights.numpy().tobytes()))
        are_equal.append("same" if checksums[0] == checksums[1] else "differ")
    if rank == 0:
        print_row("distance of the ranks' weights", distances)
        print_row("checksums", are_equal)


# 4. The ranks differ, or do not.
def differ(rank: int, losses: Tensor) -> None:
    model, _ = new_model(seed=rank)
    norms = on_all_ranks(model[0].weight.norm().item())
    ddp_model = DistributedDataParallel(model)  # broadcasts rank 0's weights
    norms += on_all_ranks(model[0].weight.norm().item())
    if rank == 0:
        print_row("norms before DDP, and after it", norms)
    noise = []
    for reads_same in (False, True):
        gradients = []
        for step in range(200):
            x, y = batch(step, 0 if reads_same else rank)
            model.zero_grad()
            F.mse_loss(ddp_model(x), y).backward()
            gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        noise.append(torch.stack(gradients).var(dim=0).sum().item())
    if rank == 0:
        print_row("noise: own data, same data, ratio", [*noise, noise[1] / noise[0]])
    for _ in range(3 - rank):  # rank 0 has three micro-batches, rank 1 has two
        dist.monitored_barrier(timeout=timedelta(seconds=2))
        F.mse_loss(ddp_model(x), y).backward()
    # As in read_nan, rank 1 lives until rank 0 has reported it: then run_two_ranks kills it.
    time.sleep(60)


if __name__ == "__main__":
    new_model()  # imports what an optimizer needs, before the processes exist
    print_row("1. a NaN on rank 1", [f"step {step}" for step in range(STEPS)])
    for policy in ("nobody decides", "each decides", "all decide", "GradScaler"):
        for rank, losses in enumerate(run_two_ranks(read_nan, policy)):
            print_row(f"{policy}: loss of rank {rank}", losses.tolist())
    print("2. rank 1 is killed")
    with TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "ckpt.pt"
        for name, dies, resumes in (
            ("whole", False, False),
            ("killed", True, False),
            ("resumed", False, True),
        ):
            losses = run_two_ranks(be_killed, checkpoint, dies, resumes)
            print_row(f"{name}: loss of rank 0", losses[0].tolist())
    print("3. a forgotten all-reduce")
    for name, calls_ddp in (("with DDP", True), ("without DDP", False)):
        losses = run_two_ranks(forget, calls_ddp)
        print_row(f"{name}: loss of rank 0", losses[0].tolist())
    print("4. ranks that differ, or do not")
    run_two_ranks(differ)
