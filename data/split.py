"""
Take val.bin from the end of train.bin, for a data set without a val.bin. The original is kept as all.bin,
from which the command can be repeated with a different --val_fraction.
"""

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))
from bins import add_val_fraction, cut_for, run
from count_bytes import count_bytes
from write_files import atomic_files

from isogpt.data.dataset import open_tokens, parts_of, read_meta
from isogpt.data.token_files import declared_dtype
from isogpt.data.vocabulary import vocabulary_of_data


def split(folder: Path, val_fraction: float) -> None:
    """
    Write val.bin and train.bin in `folder` from all.bin, or from train.bin, which becomes all.bin. train.bin
    is written last: after a kill, train.bin is missing, and the command can be repeated.

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
    tokens = open_tokens(source, declared_dtype(meta, folder), meta.get("vocab_size", 0))
    if tokens.offset:
        raise ValueError(
            f"{source} begins with llm.c's header: rename a different file of this data set to val.bin"
        )
    cut = cut_for(len(tokens), val_fraction, "tokens")
    if source == train:
        try:  # a second name: train.bin stays until the new files are complete
            os.link(train, whole)
        except OSError:  # the file system lacks links
            os.replace(train, whole)
    parts = {"val.bin": parts_of(tokens, cut), "train.bin": parts_of(tokens, 0, cut)}
    with atomic_files(folder, *parts) as files:
        for name, part in parts.items():
            files[name].writelines(part)
    if vocabulary_of_data(meta, folder) or "val_bytes" in meta:  # otherwise they need not be GPT-2's
        try:
            count_bytes(folder)
        except ValueError as e:
            print(f"note: without bits per byte: {e}")
    print(f"{folder}: {cut:,} tokens in train.bin, {len(tokens) - cut:,} in val.bin; all of them in all.bin")


def main(argv: list[str]) -> None:
    """Parse the arguments and divide the file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="the folder that contains train.bin")
    add_val_fraction(parser, default=0.1)
    args = parser.parse_args(argv)
    split(args.folder, args.val_fraction)


if __name__ == "__main__":
    sys.exit(run(main))
