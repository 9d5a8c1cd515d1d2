"""Each lesson prints the numbers that its page predicts, and lessons/minimal.py the losses of train.py."""

import math
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from runs import REPO, column, tiny_data

PAGES = sorted((REPO / "lessons").glob("[0-9]-*.md"))
MEASURED = "measured:"  # begins a line whose numbers depend on the machine
NUMBER = re.compile(r"-?\d+\.\d+(?:e[-+]\d+)?")


def test_there_are_eight_lessons_of_one_page():
    assert [page.name[0] for page in PAGES] == list("12345678")
    for page in PAGES:
        text = page.read_text()
        assert len(text.split()) <= 1000, page.name
        assert text.count("<details>") == 2, f"{page.name}: two exercises with their answers"


def command_and_output(page: Path) -> tuple[list[str], list[str]]:
    """A lesson's command, in words, and the lines that its page shows after it."""
    block = re.search(r"^```sh\n(.+?)\n```\n+```\n(.+?)\n```", page.read_text(), re.M | re.S)
    assert block, f"{page.name} shows no command with its output"
    return shlex.split(block[1].replace("\\\n", " ")), block[2].splitlines()


def assert_same_lines(printed: list[str], expected: list[str]):
    """Equal but for the lines that begin with `measured:`; numbers with a decimal point up to 1e-3."""
    printed = [line for line in printed if not line.startswith(MEASURED)]
    expected = [line for line in expected if not line.startswith(MEASURED)]
    assert [NUMBER.sub("N", line) for line in printed] == [NUMBER.sub("N", line) for line in expected]
    for line, predicted in zip(printed, expected, strict=True):
        numbers = [float(number) for number in NUMBER.findall(line)]
        assert numbers == pytest.approx([float(number) for number in NUMBER.findall(predicted)], 1e-3, 1e-3), line


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if page.name[0] != "1"], ids=lambda page: page.stem)
def test_a_lesson_prints_what_its_page_predicts(page):
    command, expected = command_and_output(page)
    done = run_command(command, REPO)
    assert_same_lines(done.stdout.splitlines(), expected)


def run_command(command: list[str], folder: Path) -> subprocess.CompletedProcess:
    if command[0] == "torchrun":
        command = ["python", "-m", "torch.distributed.run", *command[1:]]
    done = subprocess.run([sys.executable, *command[1:]], cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done
