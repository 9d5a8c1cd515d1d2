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
    devices = c.devices or str(processes)
    cards = c.hardware.lower().split(",")
    report([*rules_of_values(c, devices, cards, lists), *rules_of_reports(c, cards, lists, is_launched)])
    return [int(n) for n in devices.split(",")], cards


def rules_of_values(c: SimpleNamespace, devices: str, cards: list[str], lists: dict) -> Iterator[str]:
    """A sentence for each setting with a wrong value."""
    for name, text in {"devices": devices, "nproc": ",".join(lists.get("nproc", "1"))}.items():
        if not re.fullmatch(r"([1-9]\d{0,5}(,|$))+", text):
            yield f"{name} is {text!r}: type a number, or several such as --{name}=1,2,8"
    for n in map(int, re.findall(r"\d+", devices)):
        if c.plan and n > c.per_node and n % c.per_node:
            yield f"devices is {n}: type a multiple of per_node, {c.per_node}"
    for card in {*cards} - {*HARDWARE, "this"}:
        yield f"hardware is {card!r}, which is not known: {KNOWN_CARDS}"
    path = Path(c.json_path).absolute()
    if c.json_path and (path.is_dir() or not path.parent.is_dir()):  # it is written after the measurement
        yield f"json_path is {c.json_path!r}: name a file in a folder that exists"


def rules_of_reports(c: SimpleNamespace, cards: list[str], lists: dict, is_launched: bool) -> Iterator[str]:
    """A sentence for each mistake in the settings that choose a report."""
    reports = [c.comm, c.plan, c.tune, c.check, bool(lists)]
    if reports.count(True) > 1:
        yield "comm, plan, tune, check and lists such as --tp=1,2 are separate reports: type one of them"
    if is_launched and any(reports[1:]):
        yield "this report starts processes several times: start bench.py without a launcher"
    is_of_plans = c.devices or c.device_memory_gb or c.device_tflops or len(cards) > 1
    is_described = cards != ["this"] and not (c.tune or c.estimate or c.estimate_world_size)
    if not c.plan and (is_of_plans or is_described):
        yield "devices and hardware are for predictions: set --plan; to measure N processes, set --nproc=N"
