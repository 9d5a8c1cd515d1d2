"""The data of a run: one data set or a mixture, whose tokens are opened and checked."""

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from pathlib import Path

import numpy as np

from isogpt.data import tokenizer
from isogpt.data.data_folder import (
    Metadata,
    find_dataset,
    is_folder,
    open_split,
    read_meta,
    read_metadata,
    text_facts,
)
from isogpt.data.documents import DocumentWindows, windows_of
from isogpt.data.mixture import PER, parse_mixture, quotas_of
from isogpt.data.token_array import TokenArray, Tokens
from isogpt.data.token_files import DataError
from isogpt.data.vocabulary import Vocabulary, vocabulary_of_data
from isogpt.data.windows import Windows

GPT2_VOCAB = 50304  # for a data set without metadata: GPT-2's 50257 ids, padded to a multiple of 64
MOST_IDS = 2**24  # more than any tokenizer uses: the file contains other numbers, or ids of another dtype
PART = 2**18  # ids that are read at a time where all ids of a file are read


@dataclass(frozen=True)
class EvalDataset:
    """
    A validation set other than that of a single data set: a further one, see `open_eval_datasets`, or that of
    a mixture's source. It is named after its folder.
    """

    folder: Path
    val: Tokens
    highest: int  # see Dataset, as the other fields
    vocabulary: Vocabulary | None = None
    val_bytes: int = 0

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.folder.resolve().name

    def bits_per_byte(self, val_loss: float) -> float | None:
        """See Dataset.bits_per_byte."""
        return bits_per_byte(val_loss, len(self.val), self.val_bytes)


@dataclass(frozen=True)
class Source:
    """A folder of token files: the whole data set, or one part of a mixture. It is named after the folder."""

    folder: Path
    train: Tokens
    val: Tokens
    windows: Windows  # those of which every order but random reads each once per epoch
    highest: int  # see Dataset, as the other fields
    digest: str
    vocabulary: Vocabulary | None = None
    val_bytes: int = 0
    val_text: str = ""
    quota: int = PER  # how many of each PER sequences are of this source

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.validation.name

    @property
    def validation(self) -> EvalDataset:
        """The source's val.bin as a separate validation set."""
        return EvalDataset(self.folder, self.val, self.highest, self.vocabulary, self.val_bytes)


@dataclass(frozen=True)
class Dataset:
    """
    The tokens of a run, and the vocabulary size, from the metadata or GPT-2's. With one source, the tokens
    and the folder are those of the source. Those of a mixture are the tokens of the sources one after the
    other, sorted by name.
    """

    folder: Path  # for messages: of a mixture, the sources' folders
    sources: tuple[Source, ...]
    train: Tokens
    val: Tokens
    vocab_size: int
    highest: int  # the highest id found when the files were checked
    digest: str  # digest of lengths and samples of the files, to compare machines
    vocabulary: Vocabulary | None = None  # what the ids mean; None if the folder does not say
    val_bytes: int = 0  # of the text that val.bin contains, in UTF-8; 0: the metadata does not say
    val_text: str = ""  # SHA-256 of this text, or of a mixture's texts; "": the metadata does not say
    further: tuple[EvalDataset, ...] = ()  # validation sets that are evaluated too

    @property
    def is_mixture(self) -> bool:
        """Whether there are several sources."""
        return len(self.sources) > 1

    @cached_property
    def quotas(self) -> list[int]:
        """How many of each PER sequences are of each source."""
        return [source.quota for source in self.sources]

    @cached_property
    def begins(self) -> np.ndarray:
        """The position in `train` at which each source begins."""
        lengths = np.array([len(source.train) for source in self.sources])
        return np.cumsum(lengths) - lengths

    @property
    def named(self) -> tuple[EvalDataset, ...]:
        """The validation sets whose losses are reported by name: of a mixture's sources, and further ones."""
        of_sources = tuple(source.validation for source in self.sources) if self.is_mixture else ()
        return of_sources + self.further

    @cached_property
    def splits(self) -> dict[str, Tokens]:
        """What an evaluation reads: train, val (not of a mixture), and val/NAME for each in `named`."""
        val = {} if self.is_mixture else {"val": self.val}
        return {"train": self.train, **val, **{f"val/{one.name}": one.val for one in self.named}}

    @property
    def bytes_per_token(self) -> float | None:
        """
        The mean number of bytes of a token of val.bin; None: the metadata does not say. Of a mixture, the
        mean over the sources, weighted by their quotas.
        """
        if not self.val_bytes:
            return None
        if not self.is_mixture:
            return self.val_bytes / len(self.val)
        return sum(one.quota * one.val_bytes / len(one.val) for one in self.sources) / PER

    def val_loss(self, losses: dict[str, float]) -> float:
        """
        The validation loss, from the losses of `splits`. Of a mixture, the mean over the sources, weighted by
        their quotas.
        """
        if not self.is_mixture:
            return losses["val"]
        return sum(one.quota * losses[f"val/{one.name}"] for one in self.sources) / PER

    def bits_per_byte(self, val_loss: float) -> float | None:
        """
        Convert a loss in nats per token of val.bin to bits per byte of its text, which does not depend on the
        tokenizer; None: the metadata does not say how long the text is.
        """
        if self.is_mixture:
            return bits_per_byte(val_loss, 1, self.bytes_per_token or 0)
        return bits_per_byte(val_loss, len(self.val), self.val_bytes)

    @property
    def documents(self) -> dict[str, DocumentWindows]:
        """The windows that begin with a document, by source; {} with another order of the data."""
        of_sources = {source.name: source.windows for source in self.sources}
        return {name: one for name, one in of_sources.items() if isinstance(one, DocumentWindows)}

    def validation(self) -> dict:
        """What metrics.jsonl records of the validation text."""
        return {"val_text": self.val_text, "val_bytes": self.val_bytes, "val_tokens": len(self.val)}

    def describe(self) -> dict[str, dict]:
        """
        What a checkpoint records of the data besides the digest: `sources` for a mixture, and `documents` for
        windows that begin with a document, both by the source's name.
        """
        sources = {one.name: {"digest": one.digest, "of_1000": one.quota} for one in self.sources}
        described = {
            "sources": sources if self.is_mixture else {},
            "documents": {name: windows.digest for name, windows in self.documents.items()},
        }
        return {name: value for name, value in described.items() if value}

    def facts(self) -> dict:
        """What must be the same on all ranks, named as in messages."""
        facts = {"the data's digest": self.digest, "the data's vocabulary size": self.vocab_size}
        facts |= {f"the data's {name}": value for name, value in self.describe().items()}
        if self.further:
            digests = {one.name: digest_of({"val": one.val}) for one in self.further}
            facts["the digest of eval_datasets"] = digests
        return facts


def bits_per_byte(loss: float, tokens: int, text_bytes: float) -> float | None:
    """
    Convert a loss in nats per token to bits per byte of the text, which consists of this many tokens and
    bytes. None if its length in bytes is not known (0).
    """
    return loss / math.log(2) * tokens / text_bytes if text_bytes else None


def open_dataset(
    name: str, block_size: int, vocab_size: int = 0, eval_datasets: str = "", data_order: str = "random"
) -> Dataset:
    """
    Open the files of a data set or of a mixture, and check them.

    Args:
        name: see find_sources.
        block_size: each split must contain at least block_size + 1 tokens.
        vocab_size: ids must be below this number; 0: the size in the metadata, the largest of a mixture's.
        eval_datasets: names of further validation sets, see `open_eval_datasets`.
        data_order: train.py's setting, see documents.windows_of.

    Raises:
        ValueError: a file is missing, empty, too short or truncated, an id is outside the vocabulary, the
            metadata cannot be read, or the data sets of a mixture do not belong together.
    """
    weights = find_sources(name)
    metas = [read_metadata(folder) for folder in weights]
    vocabulary = common_vocabulary(metas)
    known_sizes = [vocab_size or meta.vocab_size for meta in metas]
    vocab_size = max(known_sizes) or GPT2_VOCAB
    sources = tuple(
        open_source(meta, known_size, vocab_size, block_size, data_order)
        for meta, known_size in zip(metas, known_sizes, strict=True)
    )
    further = open_eval_datasets(eval_datasets, block_size, vocab_size)
    if len(sources) > 1:
        return mix(sources, [*weights.values()], vocab_size, vocabulary, further)
    (source,) = sources
    return Dataset(
        source.folder,
        sources,
        source.train,
        source.val,
        vocab_size,
        source.highest,
        source.digest,
        source.vocabulary,
        source.val_bytes,
        source.val_text,
        further,
    )


def open_source(meta: Metadata, known_size: int, vocab_size: int, block_size: int, data_order: str) -> Source:
    """
    Open the token files of one folder and check them, see open_dataset.

    Args:
        known_size: the number of ids by the metadata or the setting, from which an undeclared dtype is
            judged; 0: not known.
        vocab_size: of the run.
    """
    folder, vocabulary = meta.folder, meta.vocabulary
    if vocabulary and vocabulary.size and vocabulary.size > vocab_size:
        problem = f"{folder} describes {vocabulary.size} token ids, but the vocabulary size is {vocab_size}"
        raise ValueError(f"{problem}: set --vocab_size={vocabulary.size} or more")
    splits = {
        split: open_split(folder, split, meta.content, known_size, block_size) for split in ("train", "val")
    }
    return Source(
        folder,
        **splits,
        windows=windows_of(folder, splits["train"], meta.content, data_order, block_size),
        highest=max(highest_id(tokens, vocab_size) for tokens in splits.values()),
        digest=digest_of(splits),
        vocabulary=vocabulary,
        **text_facts(meta.content, folder),
    )


def mix(
    sources: tuple[Source, ...],
    weights: list[Fraction | None],
    vocab_size: int,
    vocabulary: Vocabulary | None,
    further: tuple[EvalDataset, ...],
) -> Dataset:
    """
    Return the mixture of several sources. Raises ValueError if a source would get no sequences, or has the
    name of a further validation set.
    """
    if twice := sorted({one.name for one in sources} & {one.name for one in further}):
        raise ValueError(
            f"eval_datasets contains {twice[0]}, but losses are reported by the folder's name, and dataset "
            f"contains {twice[0]} too: leave it out of --eval_datasets=, or rename one of the folders"
        )
    named = {
        one.name: len(one.train) if weight is None else weight
        for one, weight in zip(sources, weights, strict=True)
    }
    quotas = quotas_of(named)
    sources = tuple(replace(one, quota=quota) for one, quota in zip(sources, quotas, strict=True))
    folder = Path(" and ".join(str(one.folder) for one in sources))
    texts = [one.val_text for one in sources]
    return Dataset(
        folder,
        sources,
        TokenArray(folder, [one.train for one in sources]),
        TokenArray(folder, [one.val for one in sources]),
        vocab_size,
        max(one.highest for one in sources),
        digest_of_parts([one.digest for one in sources], quotas)[:12],
        vocabulary,
        sum(one.val_bytes for one in sources) if all(one.val_bytes for one in sources) else 0,
        digest_of_parts(texts, quotas) if all(texts) else "",
        further,
    )


def digest_of_parts(digests: list[str], quotas: list[int]) -> str:
    """The SHA-256 of the digests of a mixture's sources and their quotas."""
    return hashlib.sha256(json.dumps([digests, quotas]).encode()).hexdigest()


def find_sources(name: str) -> dict[Path, Fraction | None]:
    """
    Find the folders of a data set or mixture; returns {folder: weight}, sorted by the folder's name, so that
    their order in `name` does not matter. Weights are None where none are given.

    Args:
        name: as in find_dataset, or several names with weights or without, see mixture.parse_mixture.

    Raises:
        ValueError: a folder is missing, is named twice, or has the same name as another one; or see
            parse_mixture.
    """
    found, weights = {}, {}  # by the folder's name
    for part, weight in parse_mixture(name, is_folder):
        folder = find_dataset(part)
        label = folder.resolve().name
        other = found.setdefault(label, folder)
        if label in weights and folder.resolve() == other.resolve():
            alike = f" ({other} is the same folder)" if folder != other else ""
            raise ValueError(
                f"--dataset={name} contains {folder} twice{alike}: name it once, with the sum of the weights"
            )
        if label in weights:
            raise ValueError(
                f"--dataset={name} contains {other} and {folder}, but losses are reported by the folder's "
                f"name, {label!r}: rename one of the folders"
            )
        weights[label] = weight
    return {found[label]: weights[label] for label in sorted(found)}


def common_vocabulary(metas: list[Metadata]) -> Vocabulary | None:
    """
    The vocabulary of the data sets of a mixture, the one with the most ids; None if none of them says what
    its ids mean. Raises ValueError if an id is known to mean different things.
    """
    known = [meta for meta in metas if meta.vocabulary]
    if not known:
        return None
    most = max(known, key=lambda meta: (meta.vocabulary.kind != "unknown", meta.vocabulary.size or 0))
    for meta in known:
        if problem := tokenizer.difference(most.vocabulary, meta.vocabulary):
            raise ValueError(
                f"the token ids of {meta.folder} are not those of {most.folder}, with which they are to be "
                f"mixed: {problem}. {how_to_mix(most, meta)}"
            )
    return most.vocabulary


def how_to_mix(one: Metadata, other: Metadata) -> str:
    """What to do about two data sets whose tokenizers differ."""
    options = {"tiktoken": one.vocabulary.name, "tokenizer.json": str(one.folder)}
    option = options.get(one.vocabulary.kind)
    if option and one.vocabulary.name != "char":
        return (
            f"Run the prepare.py of {other.folder} with the tokenizer of {one.folder}: --tokenizer={option}"
        )
    if other.vocabulary.name not in ("char", "unknown"):
        return how_to_mix(other, one)
    return "Run the prepare.py of both with the same tokenizer, such as --tokenizer=gpt2"


def open_eval_datasets(names: str, block_size: int, vocab_size: int) -> tuple[EvalDataset, ...]:
    """
    Open further validation sets: the files of val suffice. Whether their ids mean what the model's ids mean
    is checked later, see run_vocabulary.vocabulary_for_run.

    Args:
        names: separated by commas, each as in find_dataset.
        block_size: each must contain at least block_size + 1 tokens.
        vocab_size: number of the run's token ids, from which an undeclared dtype is judged.

    Raises:
        ValueError: see open_dataset; or two folders have the same name.
    """
    further = {}
    for name in filter(None, map(str.strip, names.split(","))):
        folder = find_dataset(name, "val")
        meta = read_meta(folder)
        val = open_split(folder, "val", meta, vocab_size, block_size)
        highest, vocabulary = highest_id(val, MOST_IDS), vocabulary_of_data(meta, folder)
        one = EvalDataset(folder, val, highest, vocabulary, text_facts(meta, folder)["val_bytes"])
        if one.name in further:
            raise ValueError(
                f"eval_datasets contains {further[one.name].folder} and {folder}, but losses are reported by "
                f"the folder's name, {one.name!r}: rename one of the folders, or name only one"
            )
        further[one.name] = one
    return tuple(further.values())


def highest_id(tokens: Tokens, vocab_size: int) -> int:
    """
    Return the highest id in a small file, or in a thousand samples of a large file (each batch is checked
    when it is read). Raises DataError if an id is outside the vocabulary.
    """
    if len(tokens) > 2**26:
        return check_ids(samples(tokens, 1000), vocab_size, tokens, sample_starts(tokens, 1000))
    parts = enumerate(parts_of(tokens))
    return max(check_ids(part, vocab_size, tokens, np.array([i * PART])) for i, part in parts)


def check_ids(windows: np.ndarray, vocab_size: int, tokens: Tokens, starts: np.ndarray) -> int:
    """
    Return the highest id in windows (len(starts), length) of `tokens`. Raises DataError if an id is outside
    the vocabulary: on a GPU the embedding would fail with an opaque error.
    """
    lowest, highest = int(windows.min()), int(windows.max())
    if lowest >= 0 and highest < vocab_size:
        return highest
    row, column = np.unravel_index(windows.argmin() if lowest < 0 else windows.argmax(), windows.shape)
    path = tokens.file_at(int(starts[row] + column))
    if lowest < 0:
        raise DataError(
            f"{path} holds token id {lowest}: remove the ids below 0, such as padding, and write it again"
        )
    raise DataError(f"{path} holds token id {highest}, but {about_id(highest, vocab_size, path)}")


def about_id(highest: int, vocab_size: int, path: Path) -> str:
    """What to do about a file that contains an id outside the vocabulary."""
    advice = (
        f"set --vocab_size={highest + 1} or more if the tokenizer has so many ids; if not, the file or the "
        "metadata next to it is wrong: prepare it again"
    )
    if highest >= MOST_IDS:
        advice = (
            'no tokenizer has so many ids: declare the dtype of its ids, as in {"dtype": "uint16"} in '
            f"{path.with_name('meta.json')}, or prepare it again"
        )
    return f"the vocabulary size is {vocab_size}: {advice}"


def digest_of(splits: dict[str, Tokens]) -> str:
    """A digest of the lengths and of samples of the files, with which machines and runs are compared."""
    digest = hashlib.sha256()
    for tokens in splits.values():
        digest.update(len(tokens).to_bytes(8, "little"))
        digest.update(samples(tokens, 64))
    return digest.hexdigest()[:12]


def samples(tokens: Tokens, n: int) -> np.ndarray:
    """n evenly spaced samples of a file: 4096 tokens each, or all of a shorter file."""
    return tokens.read(sample_starts(tokens, n), min(4096, len(tokens)))


def sample_starts(tokens: Tokens, n: int) -> np.ndarray:
    """Where `samples` begin."""
    return np.linspace(0, max(0, len(tokens) - 4096), n).astype(np.int64)


def parts_of(tokens: Tokens, begin: int = 0, end: int | None = None) -> Iterator[np.ndarray]:
    """Yield the ids from `begin` to `end`, by default all, in parts (1, tokens) of at most PART."""
    end = len(tokens) if end is None else end
    for start in range(begin, end, PART):
        yield tokens.read(np.array([start]), min(PART, end - start))
