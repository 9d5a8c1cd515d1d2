"""Each lesson prints the numbers that its page predicts, and lessons/minimal.py the losses of train.py."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from runs import REPO, column, tiny_data

PAGES = sorted((REPO / "lessons").glob("[0-9]-*.md"))
MEASURED = re.compile(r"measured:|.*, \d+ cores?, torch ")  # a line whose numbers depend on the machine
ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # as torchrun sets it; another number of threads gives other bits
NUMBER = re.compile(r"-?\d+\.\d+(?:e[-+]\d+)?")


def test_there_are_eight_lessons_of_one_page():
    assert [page.name[0] for page in PAGES] == list("12345678")
    for page in PAGES:
        text = page.read_text()
        assert len(text.split()) <= 1100, page.name
        assert text.count("<details>") == 2, f"{page.name}: two exercises with their answers"


def command_and_output(page: Path) -> tuple[list[str], list[str]]:
    """A lesson's command, in words, and the lines that its page shows after it."""
    block = re.search(r"^```sh\n(.+?)\n```\n+```\n(.+?)\n```", page.read_text(), re.M | re.S)
    assert block, f"{page.name} shows no command with its output"
    return shlex.split(block[1].replace("\\\n", " ")), block[2].splitlines()


def assert_same_lines(printed: list[str], expected: list[str]):
    """Equal but for the lines with what was measured; numbers with a decimal point up to 1e-3."""
    printed = [line for line in printed if not MEASURED.match(line)]
    expected = [line for line in expected if not MEASURED.match(line)]
    assert [NUMBER.sub("N", line) for line in printed] == [NUMBER.sub("N", line) for line in expected]
    for line, predicted in zip(printed, expected, strict=True):
        numbers = [float(number) for number in NUMBER.findall(line)]
        assert numbers == pytest.approx(
            [float(number) for number in NUMBER.findall(predicted)], 1e-3, 1e-3
        ), line


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if page.name[0] != "1"], ids=lambda page: page.stem)
def test_a_lesson_prints_what_its_page_predicts(page):
    command, expected = command_and_output(page)
    done = run_command(command, REPO)
    assert_same_lines(done.stdout.splitlines(), expected)


MINIMAL = str(REPO / "lessons" / "minimal.py")
STEP = re.compile(r"^step (\d+): loss (\S+),", re.M)
EVALUATION = re.compile(r"^step (\d+): val loss (\S+)$", re.M)


@pytest.fixture(scope="module")
def trained(zygote, tmp_path_factory):
    """A folder with a data set and train.py's run of the settings of lessons/minimal.py."""
    work = tmp_path_factory.mktemp("minimal")
    tiny_data(work)
    args = [str(REPO / "lessons" / "same_settings.py"), "--dataset=tiny", "--device=cpu", "--out_dir=out"]
    zygote.start(args, work, env=ONE_THREAD).wait()
    return work


def minimal_losses(work: Path, *args: str, launcher: tuple[str, ...] = ()) -> dict[str, dict[int, float]]:
    """What lessons/minimal.py prints: {kind: {step: loss}}."""
    settings = ["--device=cpu", f"--dataset={work / 'data' / 'tiny'}"]
    printed = run_command(["python", *launcher, MINIMAL, *settings, *args], work, ONE_THREAD).stdout
    losses = {"loss": STEP.findall(printed), "val_loss": EVALUATION.findall(printed)}
    return {kind: {int(step): float(loss) for step, loss in lines} for kind, lines in losses.items()}


def test_minimal_has_250_lines_and_imports_nothing_of_ours():
    text = (REPO / "lessons" / "minimal.py").read_text()
    assert len(text.splitlines()) <= 250
    imported = set(re.findall(r"^(?:import|from) (\w+)", text, re.M))
    assert imported - set(sys.stdlib_module_names) == {"numpy", "torch"}


def test_minimal_prints_the_losses_of_train_to_the_bit(trained):
    losses = minimal_losses(trained)
    expected = column(trained / "out", "loss")
    assert len(expected) == 51 and losses["loss"].keys() == expected.keys()
    for step, loss in losses["loss"].items():  # nine digits tell every float32 from its neighbors
        assert np.float32(loss) == np.float32(expected[step]), step
    expected = column(trained / "out", "val_loss")
    assert losses["val_loss"] == pytest.approx({step: expected[step] for step in (0, 25, 50)}, abs=1e-6)


def test_minimal_on_two_processes_differs_by_rounding(trained):
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    losses = minimal_losses(trained, "--out_dir=two", launcher=launcher)
    assert losses["loss"] == pytest.approx(column(trained / "out", "loss"), abs=1e-5)
    assert losses["val_loss"].keys() == {0, 25, 50}


def test_minimal_resumes_with_the_same_bits_after_a_kill(trained):
    settings = ["--device=cpu", f"--dataset={trained / 'data' / 'tiny'}", "--out_dir=killed"]
    command, env = [sys.executable, MINIMAL, *settings], os.environ | ONE_THREAD
    with subprocess.Popen(command, cwd=trained, env=env, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if line.startswith("step 26:"):
                process.kill()
    resumed = minimal_losses(trained, "--out_dir=killed", "--init_from=resume")["loss"]
    expected = column(trained / "out", "loss")
    assert list(resumed) == list(range(25, 51))  # the last checkpoint was written before step 25
    assert all(np.float32(loss) == np.float32(expected[step]) for step, loss in resumed.items())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_minimal_trains_in_half_precision(trained, dtype):
    losses = minimal_losses(trained, f"--dtype={dtype}", "--out_dir=half")["loss"]
    assert losses == pytest.approx(column(trained / "out", "loss"), abs=0.02)


def run_command(
    command: list[str], folder: Path, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess:
    if command[0] == "torchrun":
        command = ["python", "-m", "torch.distributed.run", *command[1:]]
    done = subprocess.run(
        [sys.executable, *command[1:]],
        cwd=folder,
        env=os.environ | (env or {}),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done
