"""What bench.py is asked for, and what is wrong with its settings."""

import re
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

from isogpt.speed.devices import HARDWARE, KNOWN_CARDS
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
    Check the settings of bench.py.

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
    pairs = [part.partition(":") for part in c.sweep.replace(" ", "").split(";") if part]
    swept = {name: values.split(",") for name, _, values in pairs}

    problems = []
    for card in cards:
        if card not in (*HARDWARE, "this"):
            problems.append(f"hardware is {card!r}, which is not known: {KNOWN_CARDS}")
    if not all(re.fullmatch(r"\d{1,6}", number) for number in numbers):
        problems.append(f"devices is {c.devices!r}: type a number, or several such as --devices=1,2,8")
    problems += problems_of_prediction(c, cards)
    if [c.comm, bool(c.sweep), c.plan, c.tune, c.check].count(True) > 1:
        problems.append("comm, sweep, plan, tune and check are separate reports: set one of them")
    if c.check and c.nproc not in (0, 2, 4, 8):
        problems.append(f"nproc is {c.nproc}: to check layouts, set --nproc=2, 4 or 8")
    if len(swept) < len(pairs) or not all(name and values for name, _, values in pairs):
        problems.append(
            f"sweep is {c.sweep!r}: type --sweep='nproc:1,2;batch_size:4,8' or the like, each setting once"
        )
    if is_launched and (c.plan or c.tune or c.check or "nproc" in swept):
        problems.append(
            "a plan, a check and a sweep over nproc start processes themselves: start bench.py without a "
            "launcher"
        )
    if not all(re.fullmatch("[1-9][0-9]*", n) for n in swept.get("nproc", [])):
        problems.append(f"sweep is {c.sweep!r}: type numbers of processes, such as --sweep=nproc:1,2,4")
    if c.weak and swept and "nproc" not in swept:
        problems.append("weak scaling needs a sweep over nproc, such as --sweep=nproc:1,2,4")
    json_path = Path(c.json_path).absolute()
    if c.json_path and not json_path.parent.is_dir():
        problems.append(f"json_path is {c.json_path!r}, but there is no such folder: create it")
    if c.json_path and json_path.is_dir():  # else the file could not be written after the measurement
        problems.append(f"json_path is {c.json_path!r}, which is a folder: set a file in it")
    report(problems)

    counts = list(dict.fromkeys(int(number) or processes for number in numbers))
    uneven = [n for n in counts if c.plan and n > c.per_node and n % c.per_node]
    advice = f"it must be a multiple of per_node, {c.per_node}"
    report([f"devices is {n}: {advice}: set --devices={n - n % c.per_node}" for n in uneven])
    return Request(processes, counts, cards, swept)


def problems_of_prediction(c: SimpleNamespace, cards: list[str]) -> list[str]:
    """A sentence for each mistake in the settings that describe devices which need not be here."""
    problems = []
    predicts = c.plan or c.tune or c.estimate or c.estimate_world_size > 0
    describes_card = c.device_memory_gb > 0 or c.device_tflops > 0
    if (c.devices or cards != ["this"]) and not predicts:
        problems.append(
            "devices and hardware are for predictions: set --plan=True; to measure N processes, set --nproc=N"
        )
    if (len(cards) > 1 or describes_card) and not c.plan:
        problems.append("several devices, device_memory_gb and device_tflops are for a plan: set --plan=True")
    elif describes_card and (len(cards) > 1 or cards[0] in ("this", "cpu")):
        problems.append(
            "device_memory_gb and device_tflops describe a card that is otherwise like a listed card: set "
            "--hardware= to this card, such as --hardware=4090 for a card without NVLink"
        )
    return problems
