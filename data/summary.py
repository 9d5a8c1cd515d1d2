"""The summary that a prepare.py script prints: what it wrote, and the commands that train on it."""

import math
import runpy
import shlex
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the repository

from isogpt.common.files import REPOSITORY

LARGE = 20_000_000  # with so many tokens, a GPU trains GPT-2 124M rather than a small model


def report(folder: Path, meta: dict) -> None:
    """Print a summary of the data set in `folder`; `meta` is the content of its meta.json."""
    train, val, size = meta["train_tokens"], meta["val_tokens"], meta["tokenizer_size"]
    print(f"{folder}: {train:,} tokens for training, {val:,} for validation, {meta['dtype']}")
    print(f"tokenizer {meta['tokenizer']}: {size:,} ids, vocab_size {meta['vocab_size']:,}")
    if note := note_on_length(train, val):
        print(f"note: {note}")
    if min(train, val) < 2:
        return  # no command can train on it
    small, large = commands_for(folder, meta)
    if large != small:
        print(f"on a GPU: {large}")
    print(f"next: {small}")


def note_on_length(train: int, val: int) -> str:
    """What to do about a val.bin that is shorter than a sequence of config/train_small.py, or ''."""
    needed = block_size_of("config/train_small.py") + 1
    if val >= needed:
        return ""
    half = math.ceil(200 * needed / (train + val)) / 100  # twice as much as needed, since documents differ
    advice = f"set --val_fraction={half:g}" if half <= 0.5 else "use files with more text"
    return f"val.bin is shorter than a sequence of {needed - 1} tokens: {advice}"


def block_size_of(config: str) -> int:
    """The length of a sequence with a config file of this repository."""
    return runpy.run_path(str(REPOSITORY / config)).get("block_size", 1024)


def commands_for(folder: Path, meta: dict) -> tuple[str, str]:
    """
    Return the commands that train on the data set in `folder`, on a CPU and on a GPU. Without a config,
    train.py starts GPT-2 124M with 480 sequences a step: on a CPU, the first step takes minutes.
    """
    name = dataset_name(folder)
    shortest = min(meta["train_tokens"], meta["val_tokens"])

    def command(config: str, options: str = "") -> str:
        length = "" if shortest > block_size_of(config) else f" --block_size={max(1, shortest - 1)}"
        return f"python train.py {config}{options}{length}"

    config, fast = f"config/train_{name}.py", f"config/train_{name}_fast.py"
    if (REPOSITORY / config).exists():
        return command(fast if (REPOSITORY / fast).exists() else config), command(config)
    options = f" --dataset={shlex.quote(name)} --out_dir={shlex.quote(f'out-{folder.name}')}"
    small = command("config/train_small.py", options)
    if meta["train_tokens"] >= LARGE:
        return small, command("config/train_gpt2.py", f"{options} --wandb_log=False")
    is_char = meta["tokenizer"] == "char"
    return small, command("config/train_shakespeare_char.py", options) if is_char else small


def dataset_name(folder: Path) -> str:
    """The value of train.py's --dataset for a folder: the name if the folder is in data/, else the path."""
    places = (Path("data", folder.name), Path(__file__).parent / folder.name)
    has_name = any(place.resolve() == folder.resolve() for place in places)
    return folder.name if has_name else str(folder.absolute())
