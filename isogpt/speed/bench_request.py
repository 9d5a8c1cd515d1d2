"""What bench.py is asked for, and what is wrong with its settings."""

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

from isogpt.speed.devices import HARDWARE, KNOWN_CARDS
from isogpt.training.settings import report


def read_request(
    config: dict, lists: dict[str, list[str]], is_launched: bool, processes: int
) -> tuple[list[int], list[str]]:
    """
    Check the settings of bench.py. Returns the numbers of devices to plan for, and their kinds: keys of
    devices.HARDWARE, or 'this'.

    Args:
        lists: {setting: its values} of those that were typed as lists.
        is_launched: whether a launcher has started this process.
        processes: how many are launched.

    Raises:
        ValueError: one line for each problem.
    """
    c = SimpleNamespace(**config)
    counts = [*map(int, re.findall(r"\d+", c.devices) or [processes])]
    # RTX4090 and nvidia-l4 are the cards 4090 and l4
    names = re.split(r"[\s,]+", c.hardware.strip().lower())
    cards = [re.sub(r"^((nvidia|geforce|tesla|rtx)[-_]?)+", "", name) for name in names]
    report([*rules_of_prediction(c, counts, cards), *rules_of_reports(c, lists, is_launched)])
    return list(dict.fromkeys(counts)), list(dict.fromkeys(cards))


def rules_of_prediction(c: SimpleNamespace, counts: list[int], cards: list[str]) -> Iterator[str]:
    """A sentence for each mistake in the settings that describe devices which need not be here."""
    for card in cards:
        if card not in (*HARDWARE, "this"):
            yield f"hardware is {card!r}, which is not known: {KNOWN_CARDS}"
    if not re.fullmatch(r"([1-9]\d{0,5}([\s,]+|$))*", c.devices):
        yield f"devices is {c.devices!r}: type a number, or several such as --devices=1,2,8"
    for n in counts:
        if c.plan and n > c.per_node and n % c.per_node:
            yield f"devices is {n}: type a multiple of per_node, {c.per_node}"
    describes_other = bool(c.devices) or cards != ["this"]
    if describes_other and not (c.plan or c.tune or c.estimate or c.estimate_world_size):
        yield "devices and hardware are for predictions: set --plan; to measure N processes, set --nproc=N"
    if len(cards) > 1 and not c.plan:
        yield "several kinds of devices are for a plan: set --plan"
    is_listed = c.plan and len(cards) == 1 and cards[0] not in ("this", "cpu")
    if (c.device_memory_gb or c.device_tflops) and not is_listed:
        yield (
            "device_memory_gb and device_tflops describe a card that is otherwise like a listed card: set "
            "--plan, and --hardware= to this card, such as --hardware=4090 for a card without NVLink"
        )


def rules_of_reports(c: SimpleNamespace, lists: dict[str, list[str]], is_launched: bool) -> Iterator[str]:
    """A sentence for each mistake in the settings that choose a report."""
    if [c.comm, c.plan, c.tune, c.check, bool(lists)].count(True) > 1:
        yield "comm, plan, tune, check and lists such as --tp=1,2 are separate reports: type one of them"
    if c.check and c.nproc not in (0, 2, 4, 8):
        yield f"nproc is {c.nproc}: to check layouts, set --nproc=2, 4 or 8"
    if is_launched and (c.plan or c.tune or c.check or lists):
        yield "this report starts processes several times: start bench.py without a launcher"
    if not all(re.fullmatch("[1-9][0-9]*", n) for n in lists.get("nproc", [])):
        yield "nproc is no list of numbers: type --nproc=1,2,4 or the like"
    if c.weak and lists and "nproc" not in lists:
        yield "weak scaling needs a list of nproc, such as --nproc=1,2,4"
    path = Path(c.json_path).absolute()
    if c.json_path and (path.is_dir() or not path.parent.is_dir()):  # it is written after the measurement
        yield f"json_path is {c.json_path!r}: name a file in a folder that exists"
