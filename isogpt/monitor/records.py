"""What records of metrics.jsonl contain besides plain numbers, and their lines on the console."""

import math

from torch import Tensor

from isogpt.common.console import duration, shortened
from isogpt.training.step_numbers import StepNumbers

CLOSING = ("end", "preempted")  # the last event of a run that closes its files
FINAL = (*CLOSING, "failed")  # after these, the process may exit in any way


def known(numbers: dict[str, float]) -> dict[str, float | None]:
    """Return the numbers, with None in place of those that are not finite."""
    return {name: value if math.isfinite(value) else None for name, value in numbers.items()}


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


def routing_record(routing: Tensor, tokens_per_step: int) -> dict:
    """
    Return the statistics of the routers: the fewest, mean and most tokens of an expert in a step over all
    layers; the mean entropy of the routers' probabilities in nats; the auxiliary loss; and the experts
    without a token, as layer.expert.

    Args:
        routing: from parallelize.take_routing (L, E + 2).
    """
    counts = routing[:, 2:] * tokens_per_step  # (L, E)
    dead = (counts == 0).nonzero().tolist()
    return {
        "expert_tokens_min": counts.min().item(),
        "expert_tokens_mean": counts.mean().item(),
        "expert_tokens_max": counts.max().item(),
        "router_entropy": routing[:, 1].mean().item(),
        "auxiliary_loss": routing[:, 0].sum().item(),
        "dead_experts": [f"{layer}.{expert}" for layer, expert in dead],
    }


def chart_values(record: dict) -> dict:
    """
    Return the values of a step, an evaluation or a step's statistics for wandb and TensorBoard; {} for events
    and lines. As in nanoGPT, the mfu is in percent, and losses of an evaluation are called train/loss,
    val/loss and val/bpb, or val/loss_NAME and val/bpb_NAME for a further validation set.
    """
    if "event" in record:
        return {}
    if "statistics" in record:
        values = {"iter": record["iter"]}
        for kind, statistics in record["statistics"].items():
            values |= {f"{kind}/{name}": value for name, value in statistics.items()}
        return values
    if "val_loss" in record:
        # the tokens and the seconds are in the record of the step with the same iter, too
        names = [name for name in record if name not in ("tokens", "seconds")]
        return {name.replace("/", "_", 1).replace("_", "/", 1): record[name] for name in names}
    if record.get("mfu"):
        return record | {"mfu": record["mfu"] * 100}
    return record


def evaluation_line(record: dict) -> str:
    """Return the line of an evaluation; nanoGPT's tools parse the line up to the val loss."""
    line = f"step {record['iter']}: train loss {record['train_loss']:.4f}"
    line += f", val loss {record['val_loss']:.4f}"
    if "val_bpb" in record:
        line += f", {record['val_bpb']:.4f} bits per byte"
    for name, value in record.items():
        if name.startswith("val_loss/"):
            line += f", {name.removeprefix('val_loss/')} loss {value:.4f}"
    return line


def step_line(record: dict) -> str:
    """Return the line of a step on the console; nanoGPT's tools parse the line up to the mfu."""
    mfu = "n/a" if record["mfu"] is None else f"{record['mfu'] * 100:.2f}%"
    parts = (
        f"iter {record['iter']}: loss {record['loss']:.4f}",
        f"time {record['step_ms']:.2f}ms, mfu {mfu}",
        "" if record["left_s"] is None else f"{duration(record['left_s'])} left",
        f"{record['tokens_per_s']:,.0f} tokens/s",
        f"grad norm {record['grad_norm']:.3f}, lr {record['lr']:.1e}",
        f"data {record['data_ms_max']:.1f}ms, {record['memory_gb_max']:.2f} GB",
        waiting_text(record),
        routing_text(record),
    )
    return ", ".join(filter(None, parts))


def waiting_text(record: dict) -> str:
    """Return how much of a step ranks spend waiting as a part of a line; '' if this is not known."""
    if record.get("comm_percent") is None:
        return ""
    text = f"waiting: {record['comm_percent']:.0f}% of a step for communication"
    text += f", {record['slowest_percent']:.0f}% for the slowest rank"
    return text + f", {record['data_percent']:.0f}% for data"


def routing_text(record: dict) -> str:
    """Return the end of the line of a step; '' without experts."""
    if "dead_experts" not in record:
        return ""
    least, mean, most = (record[f"expert_tokens_{name}"] for name in ("min", "mean", "max"))
    text = f"tokens per expert {least:.0f} to {most:.0f}, mean {mean:.0f}"
    text += f", entropy {record['router_entropy']:.2f}"
    if dead := record["dead_experts"]:
        text += f", dead experts (layer.expert): {shortened(dead)}"
    return text
