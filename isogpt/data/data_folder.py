"""The folder of a data set: where it is found, what its metadata says, and how its token files are opened."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from isogpt.common.console import count_text, shortened, visible
from isogpt.common.files import REPOSITORY, load_pickle, parse_json, path_of_script, read_utf8
from isogpt.data.shards import advice_about_names, files_of, how_to_prepare, open_files
from isogpt.data.token_array import Tokens
from isogpt.data.token_files import declared_dtype
from isogpt.data.vocabulary import Vocabulary, vocabulary_of_data

META_PKL = ("vocab_size", "stoi", "itos")  # what is read of nanoGPT's meta.pkl
SHA256 = re.compile("[0-9a-f]{64}")


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
    advice = [*map(how_to_prepare, places), *(advice_about_names(place, split) for place in places), prepared]
    raise ValueError(f"no {split}.bin in {' or '.join(map(str, places[:2]))}; {next(filter(None, advice))}")


def prepared_datasets(split: str = "train") -> list[str]:
    """Names of the data sets that contain files of a split."""
    roots = (Path("data"), REPOSITORY / "data")
    folders = [folder for root in roots for folder in root.glob("*/") if os.access(folder, os.R_OK)]
    return sorted({visible(folder.name) for folder in folders if files_of(folder, split)})


def read_metadata(folder: Path) -> Metadata:
    """Read what a folder says about its token ids. Raises ValueError if a file cannot be read."""
    meta = read_meta(folder)
    vocabulary = vocabulary_of_data(meta, folder)
    vocab_size = meta.get("vocab_size", (vocabulary and vocabulary.size) or 0)
    if not isinstance(vocab_size, int):
        raise ValueError(f"the metadata in {folder}: vocab_size is {vocab_size!r}, not an integer")
    return Metadata(folder, meta, vocabulary, vocab_size)


def read_meta(folder: Path) -> dict:
    """
    Read a data set's metadata: meta.json, which prepare.py writes, over the vocabulary in nanoGPT's meta.pkl;
    empty if there is neither file. The pickle may contain only plain values: nothing in it runs.

    Raises:
        ValueError: one of the files cannot be read, or a meta.pkl does not contain a vocabulary.
    """
    pkl, ours = folder / "meta.pkl", folder / "meta.json"
    content = read_dict(pkl) if pkl.exists() else {}
    meta = {name: content[name] for name in META_PKL if name in content}
    if ours.exists():
        meta |= read_dict(ours)
    if content and not meta.keys() & {*META_PKL, "tokenizer"}:
        problem = f"{pkl} contains neither vocab_size nor stoi nor itos, which nanoGPT reads"
        raise ValueError(f'{problem}: write {{"vocab_size": N}} with the number of ids to {ours}')
    return meta


def read_dict(path: Path) -> dict:
    """The dict in a meta.pkl or meta.json. Raises ValueError if the file cannot be read."""
    try:
        content = load_pickle(path, allowed={}) if path.suffix == ".pkl" else parse_json(read_utf8(path))
        if not isinstance(content, dict):
            raise TypeError(f"it holds a {type(content).__name__}, not a dict")
    except Exception as e:  # a damaged pickle raises nearly anything
        raise ValueError(f"{path} cannot be read: {e}") from e
    return content


def text_facts(meta: dict, folder: Path) -> dict:
    """
    The length and the digest of the validation text, as Dataset contains them. Raises ValueError if the
    metadata contains something else under their names.
    """
    size, digest = meta.get("val_bytes", 0), meta.get("val_text", "")
    advice = f"prepare the data set again, or type: python {path_of_script('count_bytes.py')} {folder}"
    if type(size) is not int or size < 0:
        raise ValueError(f"val_bytes in {folder / 'meta.json'} is {size!r}, not a number of bytes: {advice}")
    if not isinstance(digest, str) or (digest and not SHA256.fullmatch(digest)):
        raise ValueError(f"val_text in {folder / 'meta.json'} is {digest!r}, not a SHA-256: {advice}")
    return {"val_bytes": size, "val_text": digest}


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
        need = f"block_size {block_size} needs {block_size + 1} or more"
        shorter = f"set --block_size={len(tokens) - 1} or less, or " if len(tokens) > 1 else ""
        more = (
            "use more text" if split == "train" else "set a larger --val_fraction= for prepare.py or split.py"
        )
        raise ValueError(
            f"{tokens.path} contains {count_text(len(tokens), 'token')}, but {need}: {shorter}{more}"
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
        advice = how_to_prepare(folder) or advice_about_names(folder, split) or how_to_split(folder)
        raise ValueError(f"{folder / split}.bin does not exist; {advice}")
    return open_files(files, declared_dtype(meta, folder), vocab_size)


def how_to_split(folder: Path) -> str:
    """What to do about a folder without token files of a split: what gives it a validation set."""
    train = files_of(folder, "train")
    if not train:
        return "give the folder that contains the token files"
    if len(train) == 1:
        return f"take it from the end of {train[0].name}: python {path_of_script('split.py')} {folder}"
    return f"to take the last shard, type: mv {train[-1]} {folder / 'val'}{train[-1].suffix}"
