"""The files of a split: one file, or shards."""

import os
from collections.abc import Sequence
from fnmatch import filter as matching
from glob import glob
from pathlib import Path

from isogpt.common.console import count_text
from isogpt.data.token_array import Tokens
from isogpt.data.token_files import NO_HEADER, check_width, find_file, opened


def files_of(folder: Path, split: str) -> list[Path]:
    """
    The token files of a split in the order in which they are read: train.bin alone if it exists, as in
    nanoGPT, else its shards. [] if there are none.
    """
    whole = folder / f"{split}.bin"
    return [whole] if os.path.exists(whole) else shards_of(folder, split)


def shards_of(folder: Path, split: str) -> list[Path]:
    """
    The files train*.bin and train*.npy in a folder, else *_train_*.bin, *_train.bin and the same with .npy,
    as others call them; in the order of their names. [] if the folder is missing or cannot be read.
    """
    names = sorted(glob("*.bin", root_dir=folder) + glob("*.npy", root_dir=folder))
    of_split = matching(names, f"{split}*") or matching(names, f"*_{split}[_.]*")
    return [folder / name for name in of_split]


def notes_about_files(folder: Path) -> list[str]:
    """Sentences for the user about shards that are not read, since there is a train.bin or val.bin too."""
    notes = []
    for whole in (folder / f"{split}.bin" for split in ("train", "val")):
        unread = [path.name for path in shards_of(folder, whole.stem) if path != whole]
        if unread and whole.exists():
            names = f"{count_text(len(unread), 'file')} such as {unread[0]}"
            notes.append(f"{whole} is read, but not {names}: to read these instead, move {whole.name} away")
    return notes


def open_files(paths: Sequence[Path], declared: str | None, vocab_size: int) -> Tokens:
    """
    Open the files of a split. The beginning of each is read. Whether ids of an undeclared dtype look like ids
    of 16 bits is judged by the first file only.

    Args:
        declared: the dtype that the metadata declares; None: not declared.
        vocab_size: the size in the metadata or the settings; 0: unknown.

    Raises:
        ValueError: a file is empty, truncated or of an unknown format, or the files are of different formats.
    """
    index = paths[0].with_suffix(".idx")
    if index.exists():
        raise ValueError(
            f"{paths[0]} has an index of Megatron, {index.name}, which is not read: write the ids with "
            "numpy.save, or declare their dtype in meta.json and move the index away"
        )
    files = [find_file(path, declared) for path in paths]
    first = files[0]
    if first.header == NO_HEADER and not declared:
        check_width(first, vocab_size)
    for file in files:
        if (file.header, file.dtype) != (first.header, first.dtype):
            raise ValueError(
                f"{first.path} contains {first.dtype} and {first.header}, but {file.path} {file.dtype} and "
                f"{file.header}: move the files that do not belong together to separate folders"
            )
    if len(files) == 1:
        opened(first)  # so that it stays this file if its name is given to another one
        return Tokens(first.path, files)
    prefix = os.path.commonprefix([path.name for path in paths])
    return Tokens(first.path.with_name(f"{prefix}*"), files)
