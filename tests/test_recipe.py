"""The fast recipe, completely."""

import re

import numpy as np
import pytest
import torch
from runs import SHAKESPEARE

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
def test_the_fast_recipe_reaches_its_known_loss(zygote, shakespeare):
    args = ["config/train_shakespeare_char_fast.py"]
    loss, n = trained_loss(zygote, shakespeare, args, "out-shakespeare-char-fast")
    assert loss <= 1.9 and n <= 850_000
