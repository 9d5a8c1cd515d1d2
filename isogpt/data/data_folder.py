"""The folder of a data set: where it is found, which token files are read, and what its metadata says."""

import json
import os
import reprlib
from fnmatch import filter as matching
from glob import glob
from pathlib import Path

import numpy as np

from isogpt.common.console import shortened, visible
from isogpt.common.files import REPOSITORY, load_pickle, path_of_script, read_utf8
from isogpt.data.token_files import Tokens, open_files
from isogpt.data.vocabulary import Vocabulary, vocabulary_of_data

META_PKL = ("vocab_size", "stoi", "itos")  # what is read of nanoGPT's meta.pkl

# ------------------------------------------------------------------------------------------------------------
# folders and files


def find_dataset(name: str, split: str = "train") -> Path:
    """
    Find the folder of data set `name`: data/<name> in the working folder or in the repository, or a path to
    the folder.

    Raises:
        ValueError: none of these folders contains files of the split, see `files_of`.
    """
    roots = [Path("data"), REPOSITORY / "data", Path(), REPOSITORY]
    name = os.path.expanduser(name)
    places = dict.fromkeys(root / name for root in roots)
    for place in places:
        if files_of(place, split):
            return place
    scripts = [place / "prepare.py" for place in places]
    scripts = [script for script in scripts if os.path.exists(script)]
    names = shortened(prepared_datasets(split), 20) or "none"
    advice = f"run: python {scripts[0]}" if scripts else f"prepared data sets: {names}"
    raise ValueError(f"no {split}.bin in {' or '.join(map(str, places))}; {advice}")


def prepared_datasets(split: str = "train") -> list[str]:
    """Names of the data sets that contain files of a split."""
    folders = [*Path("data").glob("*/"), *(REPOSITORY / "data").glob("*/")]
    return sorted({visible(folder.name) for folder in folders if files_of(folder, split)})


def files_of(folder: Path, split: str) -> list[Path]:
    """
    The token files of a split in the order of their names: train.bin alone if it exists, as in nanoGPT; else
    train*.bin and train*.npy; else *_train_*.bin, *_train.bin and the same with .npy, as others call them. []
    if there are none, or the folder is missing or cannot be read.
    """
    names = sorted(glob("*.bin", root_dir=folder) + glob("*.npy", root_dir=folder))
    for pattern in f"{split}.bin", f"{split}*", f"*_{split}[_.]*":
        if matches := matching(names, pattern):
            return [folder / name for name in matches]
    return []


def open_split(folder: Path, split: str, meta: dict, block_size: int) -> Tokens:
    """
    Open the files of train or val.

    Raises:
        ValueError: they are missing, cannot be opened (see token_files.open_files), are too short, or not as
            long as prepare.py has recorded.
    """
    files = files_of(folder, split)
    if not files:
        script = path_of_script("split.py")
        raise ValueError(f"{folder / split}.bin is missing: type python {script} {folder}")
    tokens = open_files(files, meta.get("dtype"))
    found = f"{folder / split}.bin contains {len(tokens)} tokens"
    recorded = meta.get(f"{split}_tokens", len(tokens))
    if recorded != len(tokens):  # some of the files were copied or written separately
        raise ValueError(f"{found}, but meta.json says {reprlib.repr(recorded)}: prepare the data set again")
    if len(tokens) <= block_size:
        raise ValueError(f"{found}, but block_size {block_size} needs {block_size + 1} or more")
    return tokens


# ------------------------------------------------------------------------------------------------------------
# metadata


def vocabulary_in(folder: Path) -> Vocabulary | None:
    """What the ids in a folder mean; None if no file says it. Raises ValueError if a file cannot be read."""
    return vocabulary_of_data(read_meta(folder), folder)


def read_meta(folder: Path) -> dict:
    """
    Read a data set's metadata: meta.json, which prepare.py writes, over the vocabulary in nanoGPT's meta.pkl;
    empty if there is neither file. The pickle may contain only plain values: nothing in it runs. A vocab_size
    that is not recorded is that of the vocabulary, if it is known.

    Raises:
        ValueError: one of the files cannot be read, or an entry is of a wrong type.
    """
    pkl, ours, meta = folder / "meta.pkl", folder / "meta.json", {}
    if pkl.exists():
        content = read_dict(pkl)
        meta = {name: content[name] for name in META_PKL if name in content}
    if ours.exists():
        meta |= read_dict(ours)
    for name in ("vocab_size", "val_bytes"):
        if not isinstance(meta.get(name, 0), int):
            raise ValueError(f"metadata in {folder}: {name} is {reprlib.repr(meta[name])}, not a number")
    if "vocab_size" not in meta:
        vocabulary = vocabulary_of_data(meta, folder)
        if vocabulary:
            meta["vocab_size"] = vocabulary.size
    return meta


def read_dict(path: Path) -> dict:
    """The dict in a meta.pkl or meta.json. Raises ValueError if the file cannot be read."""
    try:
        if path.suffix == ".pkl":
            return dict(load_pickle(path, allowed={}))
        return dict(json.loads(read_utf8(path)))
    except Exception as e:  # a damaged pickle raises nearly anything
        raise ValueError(f"{path} cannot be read: {e}") from e


# ------------------------------------------------------------------------------------------------------------
# without a data set


def write_random_tokens(folder: Path, vocab_size: int, length: int) -> None:
    """Write a data set of random tokens, `length` in each split."""
    tokens = np.random.default_rng(0).integers(0, vocab_size, length, dtype=np.uint32)
    for split in ("train", "val"):
        tokens.tofile(folder / f"{split}.bin")
    (folder / "meta.json").write_text(json.dumps({"dtype": "uint32"}))
