"""
Take val.bin from the end of train.bin, for a data set without a val.bin. The original is kept as all.bin,
from which the command can be repeated with a different --val_fraction. A data set of several files needs no
such command: its last file can be renamed.
"""

import argparse
import os
import sys
from pathlib import Path

from bins import add_val_fraction, cut_for, run
from count_bytes import count_bytes, record
from write_files import atomic_folder

from isogpt.data.data_folder import files_of, read_meta
from isogpt.data.dataset import parts_of
from isogpt.data.token_files import open_files
from isogpt.data.vocabulary import vocabulary_of_data


def split(folder: Path, val_fraction: float) -> None:
    """
    Write val.bin and train.bin in `folder` from all.bin, or from the only file of train, which becomes
    all.bin. After a kill, train.bin is missing, and the command can be repeated.

    Raises:
        ValueError: there is nothing to divide, there is a val.bin of different origin, a split would be
            empty, or there are several files.
    """
    whole = folder / "all.bin"
    files = [whole] if whole.exists() else files_of(folder, "train")
    if len(files) != 1:
        advice = "if there are several, rename the last one to val.bin or val.npy"
        raise ValueError(f"{folder} contains {len(files)} files of training tokens, not one: {advice}")
    source = files[0]
    if source != whole and (val := files_of(folder, "val")):
        raise ValueError(f"{val[0]} exists already: delete it if it is to come from the end of {source.name}")
    meta = read_meta(folder)
    if "train_tokens" in meta:
        raise ValueError(
            f"prepare.py wrote {source} and its val.bin: run prepare.py again, with --val_fraction="
        )
    tokens = open_files(files, meta.get("dtype"))
    cut = cut_for(len(tokens), val_fraction, "tokens")
    if tokens.files[0].offset:  # the new files have no header that says the dtype
        record(folder, {"dtype": tokens.dtype.name})
    os.replace(source, whole)
    with atomic_folder(folder) as temporary:
        for name, part in (("val.bin", parts_of(tokens, cut)), ("train.bin", parts_of(tokens, 0, cut))):
            with open(temporary / name, "wb") as file:
                file.writelines(part)
    if vocabulary_of_data(meta, folder) or "val_bytes" in meta:  # otherwise they need not be GPT-2's
        try:
            count_bytes(folder)
        except ValueError as e:
            print(f"note: train.py will not report bits per byte: {e}")
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
