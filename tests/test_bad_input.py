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
from pathlib import Path

import pytest
from runs import TINY, column, script, tiny_data, wait_for
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
    path = folder / "out/step_00000006/ckpt.pt"
    data = bytearray(path.read_bytes())
    data[5000] ^= 1
    path.write_bytes(data)


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
    "short-data": Case(["--block_size=30000"], ["train.bin contains 20000 tokens", "30000"]),
    "no-data-set": Case(["--dataset=nothere"], ["no train.bin in data/nothere", "tiny"], 2),
    # device, precision, start
    "no-gpu": Case(["--device=cuda"], ["device is 'cuda'", "--device=cpu"], 2),
    "gpt2-offline": Case(
        ["--init_from=gpt2"],
        ["cannot load 'gpt2'", "hf download gpt2 config.json", "--init_from=hf-gpt2"],
        2,
        env=OFFLINE,
    ),
    # resume
    "nothing-there": Case(
        [*RESUME, "--out_dir=nowhere"],
        ["no checkpoint to resume from in nowhere", "--out_dir=", "(here: out)"],
        2,
    ),
    "longer": Case([*RESUME, "--block_size=32"], ["block_size is 32, but the checkpoint's is 16: set"]),
    "flipped": Case(RESUME, ["step_00000006 is damaged", "ckpt.pt"], 2, flip),
    "no-step": Case(
        ["--init_from=resume:5", "--max_iters=9"], ["no step 5 to resume from in out: it contains 6, 3"]
    ),
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


@pytest.fixture
def place(trained, tmp_path):
    """A copy of `trained` that a test may change."""
    return Path(shutil.copytree(trained, tmp_path / "w", symlinks=True))


def test_data_that_cannot_be_read_ends_a_run_whose_state_is_saved(zygote, place):
    """
    Here ids outside the vocabulary that the samples at the start miss, in a step and in the evaluation at the
    end, for one of two ranks that compute together. The resumed run has the same bits.
    """
    data = zeros(place / "data/tiny", 2**26 + 10_000, 16)
    sizes = {"batch_size": 2, "gradient_accumulation_steps": 2, "micro_batch": 2, "world_size": 2}
    shape = {"block_size": 16, "vocab_size": 65}
    reader = reader_of(data, seed=1, rank=1, model_args=shape, **sizes)
    window = reader.share.pick(reader.starts(6), 0)[0]
    args = [*TINIER, "--max_iters=9", "--seed=1", "--zero=3", "--init_from=auto"]
    for split, place_of_id in (("train", window + 3), ("val", reader.eval_windows("val", 4)[-2] + 3)):
        with open(place / f"data/tiny/{split}.bin", "r+b") as file:
            file.seek(2 * int(place_of_id))
            file.write(b"F\0")  # 70
            file.flush()
            run = zygote.train([*args, "--out_dir=new"], place, 2, ok=False)
            file.seek(-2, os.SEEK_CUR)
            file.write(b"\0\0")
        assert set(run.codes) == {1} and "Traceback" not in run.text(), run.text()
        assert run.text().count(f"error: rank 1: data/tiny/{split}.bin holds token id 70") == 1
        saved = re.search(r"saved new/step_(\d+)\n", run.text())
        assert int(saved[1]) <= 6 if split == "train" else int(saved[1]) == 10
    zygote.train([*args, "--out_dir=new"], place, 2)
    zygote.train([*args, "--out_dir=straight"], place, 2)
    for key in ("loss", "val_loss"):
        assert column(place / "new", key) == column(place / "straight", key)
    for split in ("train", "val"):
        (place / f"data/tiny/{split}.bin").unlink()


def test_samples_from_a_copied_file(zygote, place):
    """Only the file was copied, not the step folder that the link points to."""
    (place / "alone").mkdir()
    shutil.copyfile(place / "out/step_00000003/ckpt.pt", place / "alone/ckpt.pt")
    assert "step 3" in zygote.start([*SAMPLE, "--out_dir=alone"], place, script="sample.py").wait().text()


def test_advice_after_a_loss_that_is_not_finite(zygote, place):
    """Without a checkpoint there is nothing to resume; and the log is valid JSON, which knows no NaN."""
    args = [*TINIER, "--learning_rate=1e30", "--min_lr=1e30", "--warmup_iters=0", "--out_dir=new"]
    run = zygote.train(args, place, ok=False)
    assert run.codes == [1] and run.text().count("error:") == 1
    assert "--learning_rate" in run.text() and "--init_from=resume" not in run.text()
    assert not re.search(r"\b(NaN|Infinity)\b", (place / "new/metrics.jsonl").read_text())


def test_valid_input_gives_no_warnings(zygote, place):
    run = zygote.train([*TINIER, "--out_dir=new"], place, nproc=2)
    assert "Warning" not in run.text() and "warning" not in run.text()


def test_a_mistake_on_a_different_machine_is_reported_there(at, capsys):
    """Rank 0 does not see it and waits for the others: only this rank can report it, if it still runs."""
    slept = []
    at.set(time, "sleep", slept.append)
    for name, value in {**MASTER, "RANK": "1"}.items():
        at.env(name, value)
    code, text = run_here(at, capsys, Case(["--device=cuda"], []))
    assert code == 1 and text.startswith("error: rank 1: device is 'cuda'") and slept == [10]
