"""
Take val.bin from the end of train.bin, for a data set without a val.bin. The original is kept as all.bin,
from which the command can be repeated with a different --val_fraction; then repeat count_bytes.py, too. A
data set of several files needs no such command: its last file can be renamed.
"""

import os
from pathlib import Path

from bins import run_on_folder
from count_bytes import record

from isogpt.data.data_folder import files_of, read_meta
from isogpt.data.dataset import parts_of
from isogpt.data.token_files import open_files


def split(folder: Path, val_fraction: float) -> None:
    """
    Write val.bin and train.bin in `folder` from all.bin, or from the only file of train, which becomes
    all.bin. After a kill, one of the two is missing, and the command can be repeated.

    Raises:
        ValueError: there is a validation set of different origin, a split would be empty, or there is not
            exactly one file.
    """
    whole = folder / "all.bin"
    files = [whole] if whole.exists() else files_of(folder, "train")
    if len(files) != 1:
        raise ValueError(f"{folder} contains {len(files)} files of training tokens, not one: see --help")
    if files != [whole] and (val := files_of(folder, "val")):
        raise ValueError(f"{val[0]} exists already: delete it if it is to come from {files[0].name}")
    meta = read_meta(folder)
    tokens = open_files(files, meta.get("dtype"))
    cut = int(len(tokens) * (1 - val_fraction))
    if not 0 < cut < len(tokens):
        raise ValueError(f"--val_fraction={val_fraction} leaves train.bin or val.bin empty: set 0.1")
    parts = {"val.bin": parts_of(tokens, cut), "train.bin": parts_of(tokens, 0, cut)}
    for name, part in parts.items():
        other = folder / f"{name}.tmp"
        other.unlink(missing_ok=True)  # of a killed process, or a link to some other file
        with open(other, "xb") as file:
            file.writelines(part)
            os.fsync(file.fileno())
    record(folder, {"dtype": tokens.dtype.name})  # the new files have no header that says the dtype
    os.replace(files[0], whole)
    (folder / "train.bin").unlink(missing_ok=True)
    for name in parts:
        os.replace(folder / f"{name}.tmp", folder / name)
    print(f"{cut:,} tokens in train.bin, {len(tokens) - cut:,} in val.bin, all of them in all.bin")


if __name__ == "__main__":
    fraction = dict(type=float, default=0.1, help="what part goes to val.bin")
    run_on_folder(split, __doc__, val_fraction=fraction)
