"""Each lesson prints the numbers that its page predicts, and lessons/minimal.py the losses of train.py."""

import re
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest
from runs import REPO, Run, Zygote, column, start_changed, tiny_data

PAGES = sorted((REPO / "lessons").glob("[0-9]-*.md"))
# a line whose numbers depend on the machine, or PyTorch's log
MEASURED = re.compile(r"measured:|.*, \d+ cores?, torch |\[rank\d\]:")
ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # as torchrun sets it; another number of threads gives other bits
# lessons/minimal.py, which is killed at its first step after a checkpoint
DIES = """
import builtins, signal
write = print
def print_and_die(text, **options):
    write(text, **options)
    if text.startswith("step 26:"):
        os.kill(os.getpid(), signal.SIGKILL)
builtins.print = print_and_die
"""
NUMBER = re.compile(r"-?\d+\.\d+(?:e[-+]\d+)?")


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
        found, numbers = ([float(n) for n in NUMBER.findall(text)] for text in (line, predicted))
        assert found == pytest.approx(numbers, 1e-3, 1e-3), line


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if page.name[0] != "1"], ids=lambda page: page.stem)
def test_a_lesson_prints_what_its_page_predicts(zygote, tmp_path, page):
    (_, *words), expected = command_and_output(page)
    script = next(word for word in words if word.endswith(".py"))
    options, args = words[: words.index(script)], words[words.index(script) + 1 :]
    nproc = int(dict(re.findall(r"--(\w+)=(\d+)", " ".join(options))).get("nproc_per_node", 1))
    run = zygote.start(args, tmp_path, nproc, script, env=ONE_THREAD).wait(300)
    assert_same_lines(Path(run.outs[0]).read_text().splitlines(), expected)


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


def minimal_losses(run: Run) -> dict[str, dict[int, float]]:
    """What a run of lessons/minimal.py has printed: {kind: {step: loss}}."""
    losses = {"loss": STEP.findall(run.text()), "val_loss": EVALUATION.findall(run.text())}
    return {kind: {int(step): float(loss) for step, loss in lines} for kind, lines in losses.items()}


def start_minimal(zygote: Zygote, work: Path, *args: str, nproc: int = 1, changes: str = "") -> Run:
    args = "--device=cpu", f"--dataset={work / 'data' / 'tiny'}", *args
    return start_changed(zygote, changes, args, work, nproc, "lessons/minimal.py", env=ONE_THREAD)


def test_minimal_has_250_lines_and_imports_nothing_of_ours():
    text = (REPO / "lessons" / "minimal.py").read_text()
    assert len(text.splitlines()) <= 250
    imported = set(re.findall(r"^(?:import|from) (\w+)", text, re.M))
    assert imported - set(sys.stdlib_module_names) == {"numpy", "torch"}


def test_minimal_prints_the_losses_of_train_to_the_bit(zygote, trained):
    """Also if it is killed and resumed."""
    before = minimal_losses(start_minimal(zygote, trained, "--out_dir=killed", changes=DIES).wait(ok=False))
    after = minimal_losses(start_minimal(zygote, trained, "--out_dir=killed", "--init_from=resume").wait())
    assert list(after["loss"]) == list(range(25, 51))  # the last checkpoint was written before step 25
    losses, val_losses = (before[kind] | after[kind] for kind in ("loss", "val_loss"))
    expected = column(trained / "out", "loss")
    assert len(expected) == 51 and losses.keys() == expected.keys()
    for step, loss in losses.items():  # nine digits tell every float32 from its neighbors
        assert np.float32(loss) == np.float32(expected[step]), step
    expected = column(trained / "out", "val_loss")
    assert val_losses == pytest.approx({step: expected[step] for step in (0, 25, 50)}, abs=1e-6)


@pytest.mark.parametrize("nproc, dtype, limit", [(2, "float32", 1e-5), (1, "float16", 0.02)])
def test_minimal_on_two_processes_and_in_half_precision(zygote, trained, nproc, dtype, limit):
    """While the learning rate rises, which does not depend on the number of steps."""
    args = [f"--dtype={dtype}", f"--out_dir={dtype}", "--max_iters=9"]
    losses = minimal_losses(start_minimal(zygote, trained, *args, nproc=nproc).wait())
    for kind, steps in (("loss", range(10)), ("val_loss", [0])):
        expected = column(trained / "out", kind)
        assert losses[kind] == pytest.approx({step: expected[step] for step in steps}, abs=limit), kind
