"""The records of metrics.jsonl and the lines of the console."""

import math
from dataclasses import dataclass, field

from torch import Tensor

from isogpt.checkpoint.progress import Progress
from isogpt.common.console import duration
from isogpt.common.files import as_json  # noqa: F401  (for the sinks)
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
    mean = StepNumbers(*(values.mean().item() for values in numbers))
    most = StepNumbers(*(values.max().item() for values in numbers))
    step_s = mean.step_ms / 1e3
    return {
        "iter": progress.step,
        "loss": mean.loss,
        "grad_norm": numbers.grad_norm.item(),
        "lr": lr,
        "step_ms": mean.step_ms,
        "step_ms_max": most.step_ms,
        "data_ms": mean.data_ms,
        "data_ms_max": most.data_ms,
        "memory_gb": mean.memory_gb,
        "memory_gb_max": most.memory_gb,
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
    if "val_loss" in record:  # the step's record, with the same iter, contains these, too
        record = {name: value for name, value in record.items() if name not in ("tokens", "seconds")}
    values = {chart_name(name): value for name, value in record.items()}
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
    further = {
        name.partition("/")[2]: value for name, value in record.items() if name.startswith("val_loss/")
    }
    return line + "".join(f", {name} loss {value:.4f}" for name, value in further.items())


def step_line(record: dict) -> str:
    """Return the line of a step on the console; nanoGPT's tools parse the line up to the mfu."""
    left = "" if record["left_s"] is None else f", {duration(record['left_s'])} left"
    waiting = f", {text}" if (text := waiting_text(record)) else ""
    mfu = f"{record['mfu'] * 100:.2f}%" if record["mfu"] is not None else "n/a"
    return (
        f"iter {record['iter']}: loss {record['loss']:.4f}, time {record['step_ms']:.2f}ms, mfu {mfu}, "
        f"{record['tokens_per_s']:,.0f} tokens/s, grad norm {record['grad_norm']:.3f}, lr "
        f"{record['lr']:.1e}, data "
        f"{record['data_ms_max']:.1f}ms, {record['memory_gb_max']:.2f} GB{left}{waiting}"
        f"{routing_text(record) if 'dead_experts' in record else ''}"
    )


def routing_text(record: dict) -> str:
    """Return the end of the line of a step with experts."""
    least, mean, most = (record[f"expert_tokens_{name}"] for name in ("min", "mean", "max"))
    text = (
        f", tokens per expert {least:.0f} to {most:.0f}, mean {mean:.0f}, entropy "
        f"{record['router_entropy']:.2f}"
    )
    if not (dead := record["dead_experts"]):
        return text
    more = f" and {len(dead) - 3} more" if len(dead) > 3 else ""
    return f"{text}, dead experts (layer.expert): {', '.join(dead[:3])}{more}"
