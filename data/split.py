"""
Take val.bin from the end of train.bin, for a data set without a val.bin. The original is kept as all.bin,
from which the command can be repeated with a different --val_fraction.
"""

import argparse
import os
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))
from bins import atomic_files, run

from isogpt.data.dataset import read_meta
from isogpt.data.token_files import declared_dtype, format_of

BLOCK = 2**24  # tokens copied at once


def split(folder: Path, val_fraction: float) -> dict[str, int]:
    """
    Write val.bin and train.bin in `folder` from all.bin, or from train.bin, which becomes all.bin. train.bin
    is written last: after a kill, train.bin is missing, and the command can be repeated.

    Returns:
        The number of tokens of each split.

    Raises:
        ValueError: there is nothing to divide, there is a val.bin of different origin, or a split would be
            empty.
    """
    whole, train, val = (folder / f"{name}.bin" for name in ("all", "train", "val"))
    source = whole if whole.exists() else train
    if not source.exists():
        raise ValueError(f"no train.bin in {folder}: give the folder that contains it")
    if source == train and val.exists():
        raise ValueError(f"{val} exists already: delete it if it is to come from the end of train.bin")
    meta = read_meta(folder)
    if "train_tokens" in meta:
        raise ValueError(
            f"prepare.py wrote {source} and its val.bin: run prepare.py again, with --val_fraction="
        )
    format = format_of(source, declared_dtype(meta, folder), meta.get("vocab_size", 0))
    if format.offset:
        raise ValueError(
            f"{source} begins with llm.c's header: rename a different file of this data set to val.bin"
        )
    tokens = np.memmap(source, format.dtype, "r")
    cut = int(len(tokens) * (1 - val_fraction)) if 0 < val_fraction < 1 else 0
    if not 0 < cut < len(tokens):
        raise ValueError(
            f"--val_fraction={val_fraction} of {len(tokens):,} tokens leaves train.bin or val.bin empty"
        )
    if source == train:
        os.replace(train, whole)
    parts = {"val.bin": tokens[cut:], "train.bin": tokens[:cut]}
    with atomic_files(folder, *parts) as files:
        for name, part in parts.items():
            for start in range(0, len(part), BLOCK):
                files[name].write(part[start : start + BLOCK])
    return {"train": cut, "val": len(tokens) - cut}


def main(argv: list[str]) -> None:
    """Parse the arguments and divide the file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="the folder that contains train.bin")
    parser.add_argument("--val_fraction", type=float, default=0.1, help="fraction of the tokens for val.bin")
    args = parser.parse_args(argv)
    sizes = split(args.folder, args.val_fraction)
    print(
        f"{args.folder}: {sizes['train']:,} tokens in train.bin, {sizes['val']:,} in val.bin; all of them "
        "in all.bin"
    )


if __name__ == "__main__":
    sys.exit(run(main))
