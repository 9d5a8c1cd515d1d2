"""The records of metrics.jsonl and the lines of the console."""

import math
from dataclasses import dataclass, field

from torch import Tensor

from isogpt.checkpoint.progress import Progress
from isogpt.common.console import duration, shortened
from isogpt.speed.devices import fraction_of_peak
from isogpt.training.step_numbers import StepNumbers

STARTS = ("start", "resume")  # the event before the first step, which contains the settings as config
CLOSING = ("end", "preempted")  # the last event of a run that closes its files
SLOW_STEPS = 3  # the first steps compile, allocate memory and start threads: no later step takes as long


@dataclass
class Means:
    """The means over steps of numbers, by name; values that are not finite are left out."""

    sums: dict[str, tuple[float, int]] = field(default_factory=dict)  # {name: (sum, number of values)}

    def add(self, numbers: dict[str, float]) -> None:
        """Add the numbers of a step."""
        for name, value in numbers.items():
            total, count = self.sums.get(name, (0.0, 0))
            self.sums[name] = (total + value, count + 1) if math.isfinite(value) else (total, count)

    def read(self) -> dict[str, float | None]:
        """Return the means of the steps since the last call; None for a number that was never finite."""
        means = {name: total / count if count else None for name, (total, count) in self.sums.items()}
        self.sums = {}
        return means


def step_record(
    progress: Progress, numbers: StepNumbers, lr: float, flops_per_step: float, peak_flops: float | None
) -> dict:
    """
    Return the record of a step. The loss is the mean over the ranks, which is the mean over the global batch.
    Since a mean hides a slow rank, the record also contains the maximum over the ranks of times and memory.

    Args:
        numbers: tensors (world_size,).
    """
    step_s = numbers.step_ms.mean().item() / 1e3
    record = {
        "iter": progress.step,
        "loss": numbers.loss.mean().item(),
        "grad_norm": numbers.grad_norm.item(),
        "lr": lr,
    }
    for name in ("step_ms", "data_ms", "memory_gb"):
        values = getattr(numbers, name)
        record |= {name: values.mean().item(), f"{name}_max": values.max().item()}
    return record | {
        "tokens_per_s": progress.tokens_per_step / step_s,
        "mfu": fraction_of_peak(flops_per_step / step_s, peak_flops),
        "tokens": progress.tokens + progress.tokens_per_step,
        "seconds": progress.seconds,
    }


def waiting_percent(numbers: StepNumbers) -> dict[str, float]:
    """
    Return the percentages of a step in which ranks wait, as means over the ranks: for data, for communication
    that no computation hides, and for the slowest rank. nan: not known.

    The rank that arrives last waits for no other rank, so its time in communication is what communication
    costs. Any time beyond that, the others spend waiting for the slowest rank.

    Args:
        numbers: tensors (world_size,).
    """
    waiting = numbers.waiting * 100
    return {
        "data_percent": (numbers.data_ms.mean() / numbers.step_ms.mean()).item() * 100,
        "comm_percent": waiting.min().item(),  # nan if any rank's share is nan
        "slowest_percent": (waiting.mean() - waiting.min()).item(),
    }


def waiting_text(record: dict) -> str:
    """Return how much of a step ranks spend waiting, as a part of a line; '' if this is not known."""
    if record.get("comm_percent") is None:
        return ""
    return (
        f"waiting: {record['comm_percent']:.0f}% of a step for communication, "
        f"{record['slowest_percent']:.0f}% for the slowest rank, {record['data_percent']:.0f}% for data"
    )


def chart_values(record: dict) -> dict:
    """
    Return the values of a step, an evaluation or a step's statistics for wandb and TensorBoard, with
    nanoGPT's names, see `chart_name`, and the mfu in percent; {} for events and lines.
    """
    if "event" in record:
        return {}
    if "statistics" in record:
        kinds = record["statistics"].items()
        values = {f"{kind}/{name}": value for kind, named in kinds for name, value in named.items()}
        return values | {"iter": record["iter"]}
    # the tokens and the seconds of an evaluation are in the record of the step with the same iter, too
    left_out = ("tokens", "seconds") if "val_loss" in record else ()
    values = {chart_name(name): value for name, value in record.items() if name not in left_out}
    if values.get("mfu"):
        values["mfu"] *= 100
    return values


def chart_name(name: str) -> str:
    """
    The name of a value in wandb and TensorBoard: train/loss, val/loss and val/bpb for an evaluation, and
    val/loss_NAME and val/bpb_NAME for a further validation set; else its name in metrics.jsonl.
    """
    quantity, _, dataset = name.partition("/")
    if quantity not in ("train_loss", "val_loss", "val_bpb"):
        return name
    return quantity.replace("_", "/") + (f"_{dataset}" if dataset else "")


def routing_record(routing: Tensor, tokens_per_step: int) -> dict:
    """
    Return the statistics of the routers: the fewest, mean and most tokens of an expert in a step over all
    layers; the mean entropy of the routers' probabilities in nats; the auxiliary loss; and the experts
    without a token, as layer.expert.

    Args:
        routing: from parallelize.take_routing (L, E + 2).
    """
    counts = routing[:, 2:] * tokens_per_step  # (L, E)
    dead = [f"{layer}.{expert}" for layer, expert in (counts == 0).nonzero().tolist()]
    return {
        "expert_tokens_min": counts.min().item(),
        "expert_tokens_mean": counts.mean().item(),
        "expert_tokens_max": counts.max().item(),
        "router_entropy": routing[:, 1].mean().item(),
        "auxiliary_loss": routing[:, 0].sum().item(),
        "dropped_tokens": 0,
        "dead_experts": dead,
    }


def evaluation_line(record: dict) -> str:
    """Return the line of an evaluation; nanoGPT's tools parse the line up to the val loss."""
    line = f"step {record['iter']}: train loss {record['train_loss']:.4f}, val loss {record['val_loss']:.4f}"
    if "val_bpb" in record:
        line += f", {record['val_bpb']:.4f} bits per byte"
    for name, value in record.items():
        if name.startswith("val_loss/"):
            line += f", {name.removeprefix('val_loss/')} loss {value:.4f}"
    return line


def step_line(record: dict) -> str:
    """Return the line of a step on the console; nanoGPT's tools parse the line up to the mfu."""
    mfu = "n/a" if record["mfu"] is None else f"{record['mfu'] * 100:.2f}%"
    parts = [
        f"iter {record['iter']}: loss {record['loss']:.4f}, time {record['step_ms']:.2f}ms, mfu {mfu}",
        f"{record['tokens_per_s']:,.0f} tokens/s, grad norm {record['grad_norm']:.3f}",
        f"lr {record['lr']:.1e}, data {record['data_ms_max']:.1f}ms, {record['memory_gb_max']:.2f} GB",
    ]
    if record["left_s"] is not None:
        parts.append(f"{duration(record['left_s'])} left")
    if waiting := waiting_text(record):
        parts.append(waiting)
    if "dead_experts" in record:
        parts.append(routing_text(record))
    return ", ".join(parts)


def routing_text(record: dict) -> str:
    """Return the end of the line of a step with experts."""
    least, mean, most = (record[f"expert_tokens_{name}"] for name in ("min", "mean", "max"))
    text = f"tokens per expert {least:.0f} to {most:.0f}, mean {mean:.0f}"
    text += f", entropy {record['router_entropy']:.2f}"
    if dead := record["dead_experts"]:
        text += f", dead experts (layer.expert): {shortened(dead)}"
    return text
