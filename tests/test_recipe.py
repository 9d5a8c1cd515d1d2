"""nanoGPT's CPU recipe, completely. It takes minutes."""

import shutil

import numpy as np
import pytest
import torch
from runs import REPO, SHARED

from isogpt import loader, run_folder
from model import GPT, GPTConfig


def whole_split_loss(model, tokens, block_size):
    """Mean loss over all targets of the split, in adjacent windows."""
    starts = np.arange(0, len(tokens) - block_size, block_size)
    total, count = 0.0, 0
    with torch.no_grad():
        for i in range(0, len(starts), 256):
            x, y = loader.read_rows(tokens, starts[i : i + 256], block_size)
            total += model(x, y, 1.0)[1].item()
            count += y.numel()
    return total / count


@pytest.mark.slow
def test_shakespeare_on_a_cpu_reaches_its_known_loss(zygote, tmp_path):
    text = SHARED / "data" / "tinyshakespeare.txt"
    if not text.exists():
        pytest.skip(f"{text} does not exist")
    folder = tmp_path / "data" / "shakespeare_char"
    folder.mkdir(parents=True)
    shutil.copy(text, folder / "input.txt")
    shutil.copy(REPO / "data" / "bins.py", tmp_path / "data")
    shutil.copy(REPO / "data" / "shakespeare_char" / "prepare.py", folder)
    zygote.start([], tmp_path, script="prepare.py", repo=folder).wait()
    recipe = [
        "--device=cpu",
        "--compile=False",
        "--eval_iters=20",
        "--log_interval=1",
        "--block_size=64",
        "--batch_size=12",
        "--n_layer=4",
        "--n_head=4",
        "--n_embd=128",
        "--max_iters=2000",
        "--lr_decay_iters=2000",
        "--dropout=0.0",
    ]
    args = ["config/train_shakespeare_char.py", *recipe]
    run = zygote.start(args, tmp_path).wait(600)
    state = run_folder.read_file(tmp_path / "out-shakespeare-char" / "ckpt_best.pt")
    model = GPT.from_state(GPTConfig(**state["model_args"]), state["model"]).eval()
    loss = whole_split_loss(model, loader.open_dataset(str(folder), 64).val, 64)
    print(f"\nval loss over the whole split: {loss:.4f} ({run.text().splitlines()[-2]})")
    assert loss <= 1.92
