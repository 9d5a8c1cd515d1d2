"""
Packages other than torch and numpy: each is imported only where it is used, and a missing one is named in one
line with the command that installs it.
"""

import re
import shutil
import sys

import pytest
from documented import documents
from runs import REPO, TINY, script, start_changed
from test_validation import write
from tokenizers import Tokenizer, models


@pytest.fixture
def hide(monkeypatch):
    """hide(package): as if it were not installed; also for modules that are imported already."""

    def without(package):
        for name in [*sys.modules]:
            if name.partition(".")[0] == package or name.startswith(f"torch.utils.{package}"):
                monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, package, None)

    return without


# ------------------------------------------------------------------------------------------------------------
# one package is missing


@pytest.fixture(scope="module")
def runs(zygote, shared_work):
    """
    Runs in the folders `gpt2` and `json`: of ids of tiktoken's gpt2, and of a tokenizer.json; the data sets;
    a text, and a folder with a model of transformers.
    """
    words = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    words.add_special_tokens(["<|endoftext|>"])
    for name, size, kind in (("gpt2", 50304, "gpt2"), ("json", 64, "tokenizer.json")):
        data = write(shared_work / "data" / name, [0] * 200, [0] * 200, vocab_size=size, tokenizer=kind)
        words.save(str(data / "tokenizer.json"))
        args = [f"--dataset={name}", f"--out_dir={name}", "--max_iters=0", "--n_embd=4", "--block_size=8"]
        zygote.train(args, shared_work)
    (shared_work / "text.txt").write_text("a a a a")
    (shared_work / "hf").mkdir()
    (shared_work / "hf" / "config.json").write_text("{}")
    return shared_work


CASES = """
tiktoken data/shakespeare/prepare.py --data_files=text.txt --out=new
tiktoken sample.py --out_dir=gpt2 --device=cpu
tokenizers data/shakespeare_char/prepare.py --data_files=text.txt --train_tokenizer=300 --out=new
tokenizers train.py --dataset=json --sample_interval=1
transformers train.py --init_from=gpt2
transformers sample.py --init_from=hf --device=cpu
transformers export.py json --to=hf
datasets data/openwebtext/prepare.py --tokenizer=data/json --out=new
wandb train.py --wandb_log=True
tensorboard train.py --tensorboard_log=True
matplotlib measure/one_curve.py
"""


@pytest.mark.parametrize("case", CASES.strip().splitlines())
def test_a_missing_package_is_named_in_one_line(at, capsys, hide, runs, case):
    at.chdir(runs)
    before = sorted(runs.rglob("*"))
    package, name, *args = case.split()
    hide(package)
    with pytest.raises(SystemExit) as exit:
        script(at, name, [*TINY, "--out_dir=new", *args] if name == "train.py" else args)
    said = f"{capsys.readouterr().err}{exit.value.code}"  # an exit with a message prints it
    errors = [line for line in said.splitlines() if not re.match(r"note: |\S+: step \d|1$", line)]
    assert len(errors) == 1 and errors[0].startswith("error: "), said
    assert f" needs {package} (" in errors[0] or f"'{package}" in errors[0], said
    assert re.search(r"\): pip install [a-z]+(, or set --[a-z_]+=\w+)?$", errors[0]), said
    assert name != "train.py" or not (runs / "new").exists()  # before the run's folder is changed
    shutil.rmtree(runs / "new", ignore_errors=True)
    assert sorted(runs.rglob("*")) == before


# ------------------------------------------------------------------------------------------------------------
# torch and numpy alone


def test_the_quick_start_needs_torch_and_numpy_alone(zygote, at):
    """prepare.py, train.py, sample.py, export.py --list and bench.py --plan, without every other package."""
    hidden = "matplotlib tiktoken tokenizers transformers datasets pyarrow pandas scipy tqdm wandb regex PIL"
    hidden = [*hidden.split(), "tensorboard", "safetensors", "requests", "huggingface_hub"]
    hiding = f"""
import sys
for name in [*sys.modules]:
    if name.partition(".")[0] in {hidden}:
        del sys.modules[name]
sys.modules.update(dict.fromkeys({hidden}))
"""
    config = str(REPO / "config/train_stdlib_char.py")
    small = ["--device=cpu", "--max_iters=2", "--eval_interval=2", "--eval_iters=1", "--batch_size=2"]
    data = ["--dataset=text", "--out_dir=out"]
    shutil.copy(REPO / "model.py", "code.txt")
    said = {}
    for name, args in {
        "data/stdlib_char/prepare.py": ["--data_files=code.txt", "--out=data/text"],
        "train.py": [config, *small, *data],
        "sample.py": ["--out_dir=out", "--device=cpu", "--num_samples=1", "--max_new_tokens=5"],
        "export.py": ["out", "--list"],
        "bench.py": [config, "--plan", "--devices=8", "--hardware=h100", *data[:1]],
    }.items():
        said[name] = start_changed(zygote, hiding, args, at.path, script=name).wait().text()
    no_plot = r"\nno plot .*: the picture needs matplotlib \(No module .*\): pip install matplotlib$"
    assert re.search(no_plot, said["train.py"])
    assert "valid (best)" in said["export.py"] and "5 tokens in" in said["sample.py"]


PINNED = r"\b([a-z0-9-]+)==([0-9.]+[0-9])"


def test_all_versions_are_pinned_and_the_docs_name_the_same_ones():
    """The tests need all but what serving needs in addition, which docs/serving.md installs by one line."""
    known = {}
    for path in [*REPO.glob("requirements*.txt"), *documents()]:
        for package, version in re.findall(PINNED, path.read_text()):
            assert known.setdefault(package, version) == version, f"{path.name}: {package}=={version}"
    lines = [path.read_text().splitlines() for path in REPO.glob("requirements*.txt")]
    for line in sum(lines, []):
        assert line.startswith(("#", "-r ")) or re.fullmatch(PINNED, line), line
    assert {"torch", "numpy", "transformers", "tensorboard", "fastapi", "uvicorn"} <= known.keys()
