"""The folder of a data set: where it is found, what its metadata says, and how its token files are opened."""

import json
import os
from dataclasses import dataclass
from pathlib import Path

from isogpt.common.console import count_text, shortened, visible
from isogpt.common.files import REPOSITORY, load_pickle, path_of_script, read_utf8
from isogpt.data.shards import files_of, open_files
from isogpt.data.token_array import Tokens
from isogpt.data.token_files import declared_dtype
from isogpt.data.vocabulary import Vocabulary, vocabulary_of_data

META_PKL = ("vocab_size", "stoi", "itos")  # what is read of nanoGPT's meta.pkl
KINDS = {"vocab_size": int, "val_bytes": int, "val_text": str}  # of what train.py calculates with


@dataclass(frozen=True)
class Metadata:
    """What the files next to the token files of a folder say."""

    folder: Path
    content: dict  # see read_meta
    vocabulary: Vocabulary | None  # None: they do not say what the ids mean
    vocab_size: int  # 0: they do not say


def places_of(name: str) -> list[Path]:
    """The folders that data set `name` may be in, the first choice first."""
    path = Path(os.path.expanduser(name))
    return list(dict.fromkeys([Path("data") / path, REPOSITORY / "data" / path, path, REPOSITORY / path]))


def is_folder(name: str) -> bool:
    """Whether a folder has this name, even if its files are not prepared."""
    return any(map(os.path.isdir, places_of(name)))


def find_dataset(name: str, split: str = "train") -> Path:
    """
    Find the folder of data set `name`: data/<name> in the working folder or in the repository, or a path to
    the folder.

    Raises:
        ValueError: none of these folders contains files of the split, see shards.files_of.
    """
    places = places_of(name)
    for place in places:
        if files_of(place, split):
            return place
    prepared = f"prepared data sets: {shortened(prepared_datasets(split), 20) or 'none'}"
    advice = next(filter(None, map(how_to_prepare, places)), prepared)
    raise ValueError(f"no {split}.bin in {' or '.join(map(str, places[:2]))}; {advice}")


def prepared_datasets(split: str = "train") -> list[str]:
    """Names of the data sets that contain files of a split."""
    folders = [folder for root in (Path("data"), REPOSITORY / "data") for folder in root.glob("*/")]
    return sorted({visible(folder.name) for folder in folders if files_of(folder, split)})


def how_to_prepare(folder: Path) -> str:
    """The command that prepares a data set again; '' if its folder does not contain a prepare.py."""
    script = folder / "prepare.py"
    return f"run: python {script}" if os.path.exists(script) else ""


def read_metadata(folder: Path) -> Metadata:
    """Read what a folder says about its token ids. Raises ValueError if a file cannot be read."""
    meta = read_meta(folder)
    vocabulary = vocabulary_of_data(meta, folder)
    return Metadata(folder, meta, vocabulary, meta.get("vocab_size", (vocabulary and vocabulary.size) or 0))


def read_meta(folder: Path) -> dict:
    """
    Read a data set's metadata: meta.json, which prepare.py writes, over the vocabulary in nanoGPT's meta.pkl;
    empty if there is neither file. The pickle may contain only plain values: nothing in it runs.

    Raises:
        ValueError: one of the files cannot be read, or an entry is of a wrong type.
    """
    pkl, ours = folder / "meta.pkl", folder / "meta.json"
    content = read_dict(pkl) if pkl.exists() else {}
    meta = {name: content[name] for name in META_PKL if name in content}
    if ours.exists():
        meta |= read_dict(ours)
    for name, kind in KINDS.items():
        if type(meta.get(name, kind())) is not kind:
            raise ValueError(
                f"the metadata in {folder}: {name} is {meta[name]!r}, not of type {kind.__name__}"
            )
    return meta


def read_dict(path: Path) -> dict:
    """The dict in a meta.pkl or meta.json. Raises ValueError if the file cannot be read."""
    try:
        content = load_pickle(path, allowed={}) if path.suffix == ".pkl" else json.loads(read_utf8(path))
        if not isinstance(content, dict):
            raise TypeError(f"it holds a {type(content).__name__}, not a dict")
    except Exception as e:  # a damaged pickle raises nearly anything
        raise ValueError(f"{path} cannot be read: {e}") from e
    return content


def open_split(folder: Path, split: str, meta: dict, vocab_size: int, block_size: int) -> Tokens:
    """
    Open the files of train or val.

    Args:
        vocab_size: the size in the metadata or the settings; 0: unknown.

    Raises:
        ValueError: the files are missing, too short, of an unknown format or not as long as prepare.py has
            recorded.
    """
    tokens = open_tokens(folder, split, meta, vocab_size)
    recorded = meta.get(f"{split}_tokens", len(tokens))
    if recorded != len(tokens):  # some of the files were copied or written separately
        problem = f"{tokens.path} contains {len(tokens)} tokens, but meta.json says {recorded}"
        raise ValueError(f"{problem}: they come from different prepare.py runs; prepare the data set again")
    if len(tokens) < block_size + 1:
        raise ValueError(
            f"{tokens.path} contains {count_text(len(tokens), 'token')}, but block_size {block_size} needs "
            f"{block_size + 1} or more: set --block_size={len(tokens) - 1} or less, or use more text"
        )
    return tokens


def open_tokens(folder: Path, split: str, meta: dict, vocab_size: int) -> Tokens:
    """
    Open the files of a split, whatever their length.

    Args:
        vocab_size: the size in the metadata or the settings; 0: unknown.

    Raises:
        ValueError: the files are missing, see `how_to_split`, or cannot be opened, see shards.open_files.
    """
    files = files_of(folder, split)
    if not files:
        advice = how_to_prepare(folder) or how_to_split(folder)
        raise ValueError(f"{folder / split}.bin does not exist; {advice}")
    return open_files(files, declared_dtype(meta, folder), vocab_size)


def how_to_split(folder: Path) -> str:
    """What gives a folder a validation set."""
    train = files_of(folder, "train")
    if not train:
        return "give the folder that contains the token files"
    if len(train) > 1:
        return f"to take the last shard, type: mv {train[-1]} {folder / 'val'}{train[-1].suffix}"
    return f"take it from the end of train.bin: python {path_of_script('split.py')} {folder}"
