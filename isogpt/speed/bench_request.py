"""What bench.py is asked for, and what is wrong with its settings."""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

from isogpt.speed.devices import HARDWARE
from isogpt.speed.layouts import MOST_DEVICES
from isogpt.training.settings import report


@dataclass(frozen=True)
class Request:
    """
    What the settings of bench.py mean.

    Args:
        processes: how many are launched.
        counts: numbers of devices to plan for.
        cards: kinds of devices to plan for: keys of devices.HARDWARE, or 'this'.
        swept: {setting: its values} of a sweep.
    """

    processes: int
    counts: list[int]
    cards: list[str]
    swept: dict[str, list[str]]


def read_request(config: dict, is_launched: bool, processes: int) -> Request:
    """
    Check the settings of bench.py, and those of train.py that were set.

    Args:
        is_launched: whether a launcher has started this process.
        processes: how many are launched.

    Raises:
        ValueError: one line for each problem.
    """
    c = SimpleNamespace(**config)
    names = re.split(r"[\s,]+", c.hardware.strip().lower())
    # RTX4090 and nvidia-l4 are the cards 4090 and l4
    cards = list(dict.fromkeys(re.sub(r"^((nvidia|geforce|tesla|rtx)[-_]?)+", "", name) for name in names))
    numbers = re.split(r"[\s,]+", c.devices.strip()) if c.devices else ["0"]

    known_cards = (*HARDWARE, "this")
    unknown = [card for card in cards if card not in known_cards]
    problems = [f"hardware is {card!r}; possible are {', '.join(known_cards)}" for card in unknown]
    problems += problems_of_devices(c, cards, numbers)
    if [c.comm, bool(c.sweep), c.plan, c.tune].count(True) > 1:
        problems.append("comm, sweep, plan and tune are separate reports: set one of them")
    if is_launched and (c.plan or c.tune):
        problems.append(
            "a plan needs no launcher: start bench.py without torchrun, with --devices=N or --nproc=N"
        )
    swept = {}
    if c.sweep:
        try:
            swept = parse_sweep(c.sweep)
        except ValueError as e:
            problems.append(str(e))
        if is_launched and "nproc" in swept:
            problems.append(
                "a sweep over nproc launches the processes itself: start bench.py without torchrun"
            )
        if c.weak and swept and len(swept.get("nproc", [])) < 2:
            problems.append("weak scaling needs a sweep over nproc, such as --sweep=nproc:1,2,4")
    problems += problems_of_json_path(c.json_path)
    report(problems)
    counts = list(dict.fromkeys(int(number) or processes for number in numbers))
    if c.plan or c.tune:
        report(problems_of_machines(counts if c.plan else [processes], c.per_node))
    return Request(processes, counts, cards, swept)


def parse_sweep(text: str) -> dict[str, list[str]]:
    """
    Return {setting: its values}, from text such as nproc:1,2;batch_size:4,8.

    Raises:
        ValueError: the text has a different form, or names a setting twice.
    """
    stripped = text.replace(" ", "").strip(";")
    if not re.fullmatch(r"\w+:[^;]+(;\w+:[^;]+)*", stripped):
        raise ValueError(f"sweep is {text!r}: type --sweep='nproc:1,2;batch_size:4,8' or the like")
    pairs = [part.split(":", 1) for part in stripped.split(";")]
    swept = {name: values.split(",") for name, values in pairs}
    if len(swept) < len(pairs):
        raise ValueError(
            f"sweep is {text!r}: it names a setting twice; list all values of a setting after one name"
        )
    return swept


def problems_of_devices(c: SimpleNamespace, cards: list[str], numbers: list[str]) -> list[str]:
    """A sentence for each mistake in the settings that describe devices to plan for."""
    problems = []
    predicts = c.plan or c.tune or c.estimate or c.estimate_world_size > 0
    describes_card = c.device_memory_gb > 0 or c.device_tflops > 0
    if not all(number.isdecimal() for number in numbers):
        problems.append(f"devices is {c.devices!r}: type a number, or several such as --devices=1,2,8")
    elif any(map(is_too_large, numbers)):
        problems.append(f"devices is {c.devices!r}: set each number to at most {MOST_DEVICES}")
    if len(cards) > 1 and not c.plan:
        problems.append(
            f"hardware is {c.hardware!r}: several devices are compared by a plan: set --plan=True"
        )
    if describes_card and (len(cards) > 1 or cards[0] in ("this", "cpu")):
        problems.append(
            "device_memory_gb and device_tflops describe a card that is otherwise like a listed card: set "
            "--hardware= to this card, such as --hardware=4090 for a card without NVLink"
        )
    if len(cards) == 1 and cards[0] != "this" and not predicts and not describes_card:
        problems.append(
            f"hardware is {c.hardware!r}, but bench.py measures this machine: to predict, set --plan=True"
        )
    if c.devices and not predicts:
        problems.append(
            f"devices is {c.devices!r}: to predict, set --plan=True; to measure N processes, set --nproc=N"
        )
    if describes_card and not c.plan:
        problems.append("device_memory_gb and device_tflops are for a plan: set --plan=True")
    return problems


def is_too_large(number: str) -> bool:
    """Whether a number of devices is too large for a plan. Python refuses to read 5,000 digits."""
    return len(number) > 9 or int(number) > MOST_DEVICES


def problems_of_json_path(json_path: str) -> list[str]:
    """A sentence if the results cannot be written."""
    path = Path(json_path).absolute()
    if not json_path:
        return []
    if not path.parent.is_dir():
        return [f"json_path is {json_path!r}: no such folder"]
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        return [f"json_path is {json_path!r}: it cannot be written, set a different file"]
    return []


def problems_of_machines(counts: list[int], per_node: int) -> list[str]:
    """A sentence for each number of devices that does not fill its machines."""
    return [
        f"devices is {n}: it must be a multiple of per_node, {per_node}: set --devices={n - n % per_node}"
        for n in counts
        if n > per_node and n % per_node
    ]
