"""nanoGPT's CPU recipe and the fast one, completely. They take minutes."""

import re

import numpy as np
import pytest
import torch
from runs import CPU_RECIPE, SHAKESPEARE

from isogpt.checkpoint.ckpt_file import read_file
from isogpt.data.dataset import open_dataset
from isogpt.data.reader import read_rows
from model import GPT, GPTConfig


def whole_split_loss(model, tokens, block_size):
    """Mean loss over all targets of the split, in adjacent windows."""
    starts = np.arange(0, len(tokens) - block_size, block_size)
    total, count = 0.0, 0
    with torch.no_grad():
        for i in range(0, len(starts), 256):
            x, y = read_rows(tokens, starts[i : i + 256], block_size)
            total += model(x, y, 1.0)[1].item()
            count += y.numel()
    return total / count


@pytest.fixture
def shakespeare(zygote, tmp_path):
    if not SHAKESPEARE.exists():
        pytest.skip(f"{SHAKESPEARE} does not exist: run python data/shakespeare_char/prepare.py")
    folder = tmp_path / "data" / "shakespeare_char"
    args = [f"--data_files={SHAKESPEARE}", f"--out={folder}"]
    zygote.start(args, tmp_path, script="data/shakespeare_char/prepare.py").wait()
    return folder


def trained_loss(zygote, folder, args, out):
    """
    Train; returns the loss of the best checkpoint over the whole validation split, and its number of
    parameters.
    """
    run = zygote.start([*args, "--device=cpu", "--log_interval=1"], folder.parent.parent).wait(600)
    state = read_file(folder.parent.parent / out / "ckpt_best.pt")
    args = state["model_args"] | state["isogpt"]["model_args"]
    model = GPT.from_state(GPTConfig(**args), state["model"]).eval()
    loss = whole_split_loss(model, open_dataset(str(folder), 64).val, 64)
    print(f"\nval loss over the whole split: {loss:.4f} ({re.search(r'^done: .*', run.text(), re.M)[0]})")
    return loss, model.get_num_params()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "changes", "known_loss"), [("char", CPU_RECIPE, 1.92), ("char_fast", [], 1.9)]
)
def test_a_recipe_reaches_its_known_loss(zygote, shakespeare, name, changes, known_loss):
    args = [f"config/train_shakespeare_{name}.py", *changes]
    loss, n = trained_loss(zygote, shakespeare, args, f"out-shakespeare-{name.replace('_', '-')}")
    assert loss <= known_loss and n <= 850_000
