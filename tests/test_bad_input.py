"""
Bad input gives one clear message: what was found, what is possible, what to type. The exit status is not 0,
nothing on disk changes, and several processes print the message once. The second part tests other things that
users do to a run.

A case for one process runs in the process of the tests, unless it needs variables of a launcher or a process
group.
"""

import os
import re
import shutil
import sys
import time
from dataclasses import dataclass, field

import pytest
from runs import TINY, assert_same_run, script, tiny_data, wait_for
from test_checkpoints import flip_a_bit
from test_loader import reader_of, zeros

TINIER = ["--n_layer=1", "--n_head=2", "--n_embd=8", "--block_size=16", "--batch_size=2", "--max_iters=5"]
SAMPLE = ["--device=cpu", "--dtype=float32", "--max_new_tokens=3", "--num_samples=1", "--start=A"]
RESUME = ["--init_from=resume", "--max_iters=9"]
MASTER = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29477"}


# ------------------------------------------------------------------------------------------------------------
# changes to a folder before the launch: it contains data/tiny and out/, a finished run with the checkpoints 3
# and 6


def flip(folder):
    """Delete the older checkpoint, and change a bit of the newer one."""
    shutil.rmtree(folder / "out/step_00000003")
    flip_a_bit(folder / "out/step_00000006/ckpt.pt")


def latin(folder):
    """A prompt that is not in UTF-8."""
    (folder / "p").write_bytes(b"\xe9")


# ------------------------------------------------------------------------------------------------------------
# the cases


@dataclass
class Case:
    args: list
    expected: list  # texts in the output
    nproc: int = 1
    prepare: object = None
    script: str = "train.py"
    env: dict = field(default_factory=dict)
    lines: int | None = 1  # of output, of all ranks; None: any number, each line once


OFFLINE = {"HF_HUB_OFFLINE": "1"}  # fail at once instead of retrying for 24 s
CASES = {
    "several-names": Case(
        ["--batch_sise=3", "--learning_rate=x", "none.py"],
        ["--batch_sise", "learning_rate='x'", "none.py"],
        2,
        lines=3,
    ),
    # data
    "no-data-set": Case(["--dataset=nothere"], ["no train.bin in data/nothere", "tiny"], 2),
    # start
    "gpt2-offline": Case(["--init_from=gpt2"], ["hf download gpt2 config.json", "=hf-gpt2"], 2, env=OFFLINE),
    # resume
    "nothing-there": Case([*RESUME, "--out_dir=nowhere"], ["resume from in nowhere", "(here: out)"], 2),
    "longer": Case([*RESUME, "--block_size=32"], ["block_size is 32, but the checkpoint's is 16: set"]),
    "flipped": Case(RESUME, ["step_00000006 is damaged", "ckpt.pt"], 2, flip),
    "no-step": Case(["--init_from=resume:5"], ["no step 5 to resume from in out: it contains 6, 3"]),
    "auto-step": Case(["--init_from=auto:resume:3"], ["init_from is 'auto:resume:3'"]),
    # out_dir
    "out-is-file": Case(["--out_dir=a"], ["out_dir", "a"], 2, lambda f: (f / "a").touch()),
    # wandb cannot start: detected before the earlier run is moved aside
    "wandb": Case(["--wandb_log=True"], ["wandb", "--wandb_log=False"], env={"WANDB_MODE": "x"}, lines=None),
    # sample.py
    "s-prompt": Case(["--start=FILE:p"], ["p is not text in UTF-8"], 2, latin, "sample.py", lines=None),
    "s-empty": Case(["--start="], ["--start is empty"], script="sample.py"),
    "s-damaged": Case([], ["is damaged"], prepare=flip, script="sample.py"),
}


def listing(folder):
    """All files below folder with their size and time, without the output of runs."""
    paths = [p for p in folder.rglob("*") if not p.name.startswith("run")]
    return {p: p.is_dir() or (p.lstat().st_size, p.lstat().st_mtime_ns) for p in paths}


@pytest.fixture(scope="module")
def trained(zygote, tmp_path_factory):
    """A folder with data/tiny and a finished run in out."""
    folder = tmp_path_factory.mktemp("trained")
    tiny_data(folder)
    zygote.train([*TINIER, "--save_interval=3"], folder)
    return folder


def arguments(case):
    return [*([*TINY, *TINIER] if case.script == "train.py" else SAMPLE), *case.args]


def launched(zygote, case, folder):
    """The exit status of rank 0 and the output of a case."""
    run = zygote.start(arguments(case), folder, case.nproc, case.script, env=case.env)
    wait_for(lambda: run.poll() or run.codes[0] is not None, 120)
    run.kill()  # like torchrun, which kills the others when one has failed
    return run.wait(ok=False).codes[0], run.text()


def run_here(at, capsys, case):
    """The same in this process, which is faster."""
    at.set(sys, "excepthook", sys.excepthook)  # which the script replaces
    at.set(os, "_exit", sys.exit)  # with which some failures end a process
    with pytest.raises(SystemExit) as exit:
        script(at, case.script, arguments(case))
    return exit.value.code, "".join(capsys.readouterr())


@pytest.mark.parametrize("name", CASES)
def test_bad_input(zygote, trained, at, capsys, name):
    case, folder = CASES[name], at.path / "w"
    shutil.copytree(trained, folder, symlinks=True)
    if case.prepare:
        case.prepare(folder)
    at.chdir(folder)
    before = listing(folder)
    needs_launch = case.nproc > 1 or case.env
    code, text = launched(zygote, case, folder) if needs_launch else run_here(at, capsys, case)
    assert code == 1 and "Traceback" not in text, text[-800:]
    for expected in case.expected:
        assert expected in text
    assert listing(folder) == before, f"something on disk changed:\n{text}"
    lines = text.strip().splitlines()
    assert len(set(lines)) == len(lines) == (case.lines or len(lines)), text


# ------------------------------------------------------------------------------------------------------------
# other things that users do


def test_data_that_cannot_be_read_ends_a_run_whose_state_is_saved(zygote, work):
    """
    Here ids outside the vocabulary that the samples at the start miss, in a step and in the evaluation at the
    end, for one of two ranks that compute together. The resumed run has the same bits.
    """
    data = zeros(work / "data/tiny", 2**26 + 10_000, 16)
    sizes = {"batch_size": 2, "gradient_accumulation_steps": 2, "micro_batch": 2, "world_size": 2}
    shape = {"block_size": 16, "vocab_size": 65}
    reader = reader_of(data, seed=1, rank=1, model_args=shape, **sizes)
    window = reader.share.pick(reader.starts(6), 0)[0]
    args = [*TINIER, "--max_iters=9", "--seed=1", "--zero=3", "--init_from=auto"]
    for split, place_of_id in (("train", window + 3), ("val", reader.eval_windows("val", 4)[-2] + 3)):
        with open(work / f"data/tiny/{split}.bin", "r+b") as file:
            file.seek(2 * int(place_of_id))
            file.write(b"F\0")  # 70
            file.flush()
            run = zygote.train([*args, "--out_dir=new"], work, 2, ok=False)
            file.seek(-2, os.SEEK_CUR)
            file.write(b"\0\0")
        assert set(run.codes) == {1} and "Traceback" not in run.text(), run.text()
        assert run.text().count(f"error: rank 1: data/tiny/{split}.bin holds token id 70") == 1
        saved = re.search(r"saved new/step_(\d+)\n", run.text())
        assert int(saved[1]) <= 6 if split == "train" else int(saved[1]) == 10
    zygote.train([*args, "--out_dir=new"], work, 2)
    zygote.train([*args, "--out_dir=straight"], work, 2)
    assert_same_run(work / "new", work / "straight")


def test_a_mistake_on_a_different_machine_is_reported_there(at, capsys):
    """Rank 0 does not see it and waits for the others: only this rank can report it, if it still runs."""
    slept = []
    at.set(time, "sleep", slept.append)
    for name, value in {**MASTER, "RANK": "1"}.items():
        at.env(name, value)
    code, text = run_here(at, capsys, Case(["--device=cuda"], []))
    assert code == 1 and re.match("error: rank 1: device is 'cuda'.*--device=cpu", text) and slept == [10]
