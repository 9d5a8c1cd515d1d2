"""
ZeRO's three stages by hand: what each rank keeps of parameters, gradients and AdamW's moments, and sends.

    torchrun --standalone --nproc_per_node=2 lessons/zero.py [--picture=lessons/zero.png]
"""

import sys
from collections import Counter

import torch
import torch.distributed as dist
from torch import Tensor

# torch 2.13 warns about the old names
all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

width, n_layer, batch_size, steps = 256, 8, 64, 5
n_params = n_layer * width**2
names = {0: "DDP", 1: "ZeRO-1", 2: "ZeRO-2", 3: "ZeRO-3"}
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
mine = slice(rank * width // world_size, (rank + 1) * width // world_size)  # this rank's rows of a matrix


def stored(tensors: list[Tensor]) -> float:
    """Bytes per parameter of the model that these tensors take; views of the same memory count once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values()) / n_params


def predict(stage: int) -> tuple[float, float]:
    """Bytes per parameter that a rank keeps, and that it sends in a step."""
    p, layer = world_size, 4 / n_layer  # one layer's matrix, which is whole for a moment
    kept = {0: 16, 1: 8 + 8 / p, 2: 4 + 12 / p + layer, 3: 16 / p + 2 * layer}
    return kept[stage], (3 if stage == 3 else 2) * 4 * (p - 1) / p


def train(stage: int) -> tuple[float, dict[str, float], float]:
    """The loss of the last step, bytes per parameter that were kept at most, and bytes sent in a step."""
    torch.manual_seed(1)
    weights = [torch.randn(width, width) / width**0.5 for _ in range(n_layer)]
    x, y = torch.randn(2, batch_size, width).chunk(world_size, dim=1)[rank]
    # what this rank updates: everything, views of its rows, or with ZeRO-3 the only rows that it keeps
    parts = [weight[mine] if stage > 0 else weight for weight in weights]
    if stage == 3:
        parts, weights = [part.clone() for part in parts], []
    optimizer = torch.optim.AdamW(parts, lr=1e-3)
    kept: dict[str, float] = {}
    sent = Counter()

    def whole(layer: int) -> Tensor:
        """A layer's matrix, which ZeRO-3 gathers for as long as it is used."""
        if stage < 3:
            return weights[layer]
        matrix = torch.empty(width, width)
        all_gather(matrix, parts[layer])
        sent["bytes"] += matrix.nbytes * (world_size - 1) / world_size
        return matrix

    for _ in range(steps):
        sent.clear()
        optimizer.zero_grad()
        h = [x]
        for layer in range(n_layer):
            h.append(torch.tanh(h[layer] @ whole(layer).T))
        error = h[-1] - y
        loss = error.square().sum() / (batch_size * width)
        dist.all_reduce(loss)

        dh = 2 * error / (batch_size * width)
        for layer in reversed(range(n_layer)):
            matrix = whole(layer)
            dz = dh * (1 - h[layer + 1].square())
            dh = dz @ matrix
            grad = dz.T @ h[layer]  # of this rank's sequences, for the whole matrix
            if stage == 0:
                dist.all_reduce(grad)
                parts[layer].grad = grad
            elif stage == 1:  # the sum takes the place of this rank's rows, and the others stay
                reduce_scatter(grad[mine], grad)
                parts[layer].grad = grad[mine]
            else:  # the sum of this rank's rows, and the rest is freed
                parts[layer].grad = torch.empty(width // world_size, width)
                reduce_scatter(parts[layer].grad, grad)
            sent["bytes"] += (2 if stage == 0 else 1) * grad.nbytes * (world_size - 1) / world_size
            moments = [t for state in optimizer.state.values() for t in state.values() if t.dim() > 0]
            now = {
                "parameters": stored([*weights, *parts, matrix]),
                "gradients": stored([part.grad for part in parts if part.grad is not None] + [grad]),
                "moments": stored(moments),
            }
            kept = max(kept, now, key=lambda sizes: sum(sizes.values()))
            del matrix, grad

        optimizer.step()
        if stage in (1, 2):
            for weight, part in zip(weights, parts, strict=True):
                all_gather(weight, part)
                sent["bytes"] += weight.nbytes * (world_size - 1) / world_size
    return loss.item(), kept, sent["bytes"] / n_params


table = {stage: train(stage) for stage in names}
if rank == 0:
    print(f"{world_size} ranks, bytes per parameter")
    print("        parameters gradients moments  total predicted  sent predicted  loss of step 5")
    for stage, (loss, kept, sent) in table.items():
        total, sends = predict(stage)
        print(
            f"{names[stage]:<8}{kept['parameters']:10.2f}{kept['gradients']:10.2f}{kept['moments']:8.2f}"
            f"{sum(kept.values()):7.2f}{total:10.2f}{sent:6.2f}{sends:10.2f}{loss:16.6f}"
        )
if rank == 0 and sys.argv[1:]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 2.5), dpi=110, layout="constrained")
    axes = figure.subplots()
    left = [0.0] * len(table)
    for part, color in {"parameters": "tab:blue", "gradients": "tab:orange", "moments": "tab:green"}.items():
        sizes = [kept[part] for _, kept, _ in table.values()]
        axes.barh(list(names.values()), sizes, left=left, color=color, label=part)
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel(f"bytes per parameter on each of {world_size} ranks")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(sys.argv[1].removeprefix("--picture="))
dist.destroy_process_group()
