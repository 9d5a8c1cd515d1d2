"""
The bytes that the ways of parallelism send per step and rank: by formula, and counted in a separate network
namespace (Linux, root), where all ranks communicate over the loopback interface and nothing else does.

    python measure/wire.py                  all layouts
    python measure/wire.py "cp 2" "tp 4"    these
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from runs import REPO, Zygote, tiny_data

from isogpt.parallel.compression import INT8_BLOCK

# Everything is divisible by 4, so no part is padded. Two micro-steps: what is sent in each of them counts
# twice.
L, C, T, V, ROWS, MICRO_STEPS = 4, 128, 256, 256, 4, 2
MODEL = [
    f"--n_layer={L}",
    f"--n_embd={C}",
    "--n_head=4",
    f"--block_size={T}",
    f"--vocab_size={V}",
    f"--batch_size={ROWS}",
    "--dataset=tiny",
    "--device=cpu",
    "--dtype=float32",
    "--eval_interval=1000000",
    "--eval_iters=1",
    "--save_checkpoint=False",
    "--log_interval=1",
]
# bytes of a block's parameters, and of the others: wte, wpe and the last norm
BLOCK = 4 * (12 * C**2 + 2 * C)
OTHERS = 4 * (V * C + T * C + C)
STREAM = 4 * ROWS * T * C  # bytes of the residual stream of a micro-batch
E, ACTIVE = 4, 2  # experts, with ep, and how many of them each token uses
LAYOUTS = {f"{name} {n}": (name, n) for n in (2, 4) for name in ("ddp", "fsdp", "tp", "pp", "cp", "ep")}
LAYOUTS["ep2 4"] = ("ep2", 4)
LAYOUTS |= {f"{name} {n}": (name, n) for name in ("exact", "exact_fsdp", "fp16", "int8") for n in (2, 4)}


def all_reduce(n, size):
    """Bytes that each of n ranks sends for the sum of tensors of `size` bytes: around a ring, twice."""
    return 2 * (n - 1) / n * size


def all_gather(n, size):
    """Bytes that each of n ranks sends so that all have the whole, of `size` bytes."""
    return (n - 1) / n * size


def reduce_scatter(n, size):
    """
    Bytes that each of n ranks sends for its part of the sum. NCCL sends (n - 1) / n; gloo runs an all-reduce.
    """
    return all_reduce(n, size)


def all_to_all(n, size):
    """Bytes that each of n ranks sends if `size` bytes go to all ranks, itself included, in equal parts."""
    return (n - 1) / n * size


def ddp(n):
    """One all-reduce of the gradients per step."""
    return all_reduce(n, L * BLOCK + OTHERS)


def fsdp(n):
    """
    In each micro-step the parameters are gathered, those of the blocks again in the backward, and the
    gradients are reduced.
    """
    gathered = all_gather(n, 2 * L * BLOCK + OTHERS)
    return MICRO_STEPS * (gathered + reduce_scatter(n, L * BLOCK + OTHERS))


def exact(n):
    """As ddp, with 64-bit integers."""
    return 2 * ddp(n)


def exact_fsdp(n):
    """As fsdp, with gradients as 64-bit integers."""
    gathered = all_gather(n, 2 * L * BLOCK + OTHERS)
    return MICRO_STEPS * (gathered + 2 * reduce_scatter(n, L * BLOCK + OTHERS))


def fp16(n):
    """Half of ddp."""
    return ddp(n) / 2


def int8(n):
    """Eight bits, and the scale of each block."""
    return ddp(n) * (8 + 32 / INT8_BLOCK) / 32


def tp(n):
    """
    In each micro-step, attention, MLP and the loss gather the stream, attention, MLP and the embedding add up
    their outputs, and the backward does the opposite of each. The loss reduces three numbers per token. Once
    per step, the gradients of norms and position embeddings are summed.
    """
    stream = (4 * L + 2) * (all_gather(n, STREAM) + reduce_scatter(n, STREAM))
    per_token = 3 * 4 * ROWS * T
    whole = 4 * (L * 2 * C + T * C + C)  # parameters that are on every rank
    return MICRO_STEPS * (stream + all_reduce(n, per_token)) + all_reduce(n, whole)


def pp(n):
    """
    The stream of each micro-batch crosses each of n - 1 boundaries, and its gradient crosses them back. The
    first and the last rank exchange the gradient of the tied embedding. Mean over the ranks.
    """
    micro_steps = -(-MICRO_STEPS // n) * n
    stream = STREAM * MICRO_STEPS / micro_steps  # of more and smaller micro-batches
    return (2 * (n - 1) * micro_steps * stream + 2 * 4 * V * C) / n


def cp(n):
    """
    In each micro-step, each block gathers keys and values, gathers them again in the backward and reduces
    their gradients. Once per step, the gradients are reduced as with DDP.
    """
    keys_values = 2 * STREAM
    per_block = 2 * all_gather(n, keys_values) + reduce_scatter(n, keys_values)
    return MICRO_STEPS * L * per_block + ddp(n)


def ep(n, degree=None):
    """
    In each micro-step, each block sends tokens to the ranks with their experts and the results back, and the
    backward does the same with gradients; first, the ranks exchange how many tokens each expert gets. Once
    per step, the gradients are reduced: those of experts over the ranks that hold the same ones, the others
    over all. Mean over the ranks: it does not depend on how even the routing is, as long as it is alike on
    all ranks, since what popular experts receive from n - 1 ranks the others do not.
    """
    degree = degree or n
    routed, counts = ACTIVE * STREAM, 8 * E
    mlp = 4 * 8 * C**2
    others = L * (BLOCK - mlp + 4 * E * C) + OTHERS  # with the routers
    exchanged = MICRO_STEPS * L * (4 * all_to_all(degree, routed) + all_to_all(degree, counts))
    return exchanged + all_reduce(n, others) + all_reduce(n // degree, L * E * mlp / degree)


def ep2(n):
    """Pairs of ranks divide the experts, and DDP joins the pairs."""
    return ep(n, 2)


def arguments(name, n):
    """train.py's settings for a layout on n ranks, with MICRO_STEPS micro-steps of ROWS rows on each."""
    accumulation = MICRO_STEPS * (1 if name in ("tp", "pp", "cp") else n)
    experts = [f"--n_expert={E}", f"--n_expert_active={ACTIVE}"]
    layouts = {"ddp": [], "fsdp": ["--zero=3"], "ep": [f"--ep={n}", *experts], "ep2": ["--ep=2", *experts]}
    layouts |= {kind: [f"--grad_compression={kind}"] for kind in ("fp16", "int8")}
    layouts |= {"exact": ["--exact=True"], "exact_fsdp": ["--exact=True", "--zero=3"]}
    flags = layouts.get(name, [f"--{name}={n}"])
    return [*MODEL, *flags, f"--gradient_accumulation_steps={accumulation}"]


def sent():
    """Bytes that have been sent over this namespace's loopback interface."""
    line = next(x for x in Path("/proc/net/dev").read_text().splitlines() if x.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[8])


def count(zygote, work, name, n, steps=(3, 15)):
    """Bytes per step and rank: the difference between a long and a short run, since both start alike."""
    totals = []
    for last in steps:
        before = sent()
        zygote.start([*arguments(name, n), f"--max_iters={last}", "--out_dir=out"], work, n).wait(300)
        totals.append(sent() - before)
    return (totals[1] - totals[0]) / (steps[1] - steps[0]) / n


def measure(names):
    """Print a row for each layout, in bytes per step and rank."""
    print(f"{'layout':10} {'formula':>12} {'counted':>12}", flush=True)
    zygote = Zygote()
    try:
        with tempfile.TemporaryDirectory() as work:
            tiny_data(work)
            for key in names:
                name, n = LAYOUTS[key]
                wanted, found = globals()[name](n), count(zygote, work, name, n)
                print(f"{key:10} {wanted:12,.0f} {found:12,.0f} {found / wanted - 1:+8.2%}", flush=True)
    finally:
        zygote.close()


if __name__ == "__main__":
    if os.environ.get("WIRE") == "counts":
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        measure(sys.argv[1:] or LAYOUTS)
    else:
        own = ["unshare", "--net", sys.executable, str(REPO / "measure" / "wire.py"), *sys.argv[1:]]
        sys.exit(subprocess.run(own, env=os.environ | {"WIRE": "counts"}).returncode)
