"""The data of a run: one data set or a mixture, whose tokens are opened and checked."""

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from pathlib import Path

import numpy as np

from isogpt.data import tokenizer
from isogpt.data.data_folder import Metadata, find_dataset, is_folder, open_split, read_metadata
from isogpt.data.documents import DocumentWindows, windows_of
from isogpt.data.mixture import PER, parse_mixture, quotas_of
from isogpt.data.token_array import Tokens
from isogpt.data.token_files import DataError
from isogpt.data.vocabulary import Vocabulary
from isogpt.data.windows import Windows

GPT2_VOCAB = 50304  # for a data set without metadata: GPT-2's 50257 ids, padded to a multiple of 64
MOST_IDS = 2**24  # more than any tokenizer uses
PART = 2**18  # ids that are read at a time where all ids of a file are read


@dataclass(frozen=True)
class Dataset:
    """
    A folder of token files, or a mixture of several, whose tokens are those of its parts one after the other,
    sorted by name. Of a further validation set, only val is opened. It is named after its folder.
    """

    folder: Path  # of a mixture, the folders of its parts, for messages
    val: Tokens
    highest: int  # the highest id found when the files were checked
    digest: str  # digest of lengths and samples of the files, to compare machines
    vocabulary: Vocabulary | None  # what the ids mean; None if the folder does not say
    val_bytes: int  # of the text that val.bin contains, in UTF-8; 0: the metadata does not say
    val_text: str  # SHA-256 of this text, or of a mixture's texts; "": the metadata does not say
    train: Tokens | None = None
    windows: Windows | None = None  # of which every order but random reads each once per epoch
    quota: int = PER  # how many of each PER sequences of a mixture are of this part
    parts: tuple["Dataset", ...] = ()  # of a mixture
    vocab_size: int = 0  # of the run: from the setting, the metadata, or GPT-2's
    further: tuple["Dataset", ...] = ()  # validation sets that are evaluated too

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.folder.resolve().name

    @property
    def is_mixture(self) -> bool:
        """Whether there are several sources."""
        return bool(self.parts)

    @property
    def sources(self) -> tuple["Dataset", ...]:
        """The parts of a mixture, or this data set alone."""
        return self.parts or (self,)

    @cached_property
    def quotas(self) -> list[int]:
        """How many of each PER sequences are of each source."""
        return [source.quota for source in self.sources]

    @cached_property
    def begins(self) -> np.ndarray:
        """The position in `train` at which each source begins."""
        return np.cumsum([0, *(len(source.train) for source in self.sources[:-1])])

    @property
    def named(self) -> tuple["Dataset", ...]:
        """The validation sets whose losses are reported by name: of a mixture's parts, and further ones."""
        return self.parts + self.further

    @cached_property
    def splits(self) -> dict[str, Tokens]:
        """What an evaluation reads: train, val (not of a mixture), and val/NAME for each in `named`."""
        val = {} if self.is_mixture else {"val": self.val}
        return {"train": self.train, **val, **{f"val/{one.name}": one.val for one in self.named}}

    def mean(self, values: Sequence[float]) -> float:
        """The mean of a value of each part of a mixture, weighted by their quotas."""
        return sum(one.quota / PER * value for one, value in zip(self.parts, values, strict=True))

    def val_loss(self, losses: dict[str, float]) -> float:
        """The validation loss, from the losses of `splits`; of a mixture, their mean."""
        if not self.is_mixture:
            return losses["val"]
        return self.mean([losses[f"val/{one.name}"] for one in self.parts])

    @property
    def bytes_per_token(self) -> float | None:
        """The mean number of bytes of a token of val.bin; None: the metadata does not say."""
        if not self.val_bytes:
            return None
        if not self.is_mixture:
            return self.val_bytes / len(self.val)
        return self.mean([one.bytes_per_token for one in self.parts])

    def bits_per_byte(self, val_loss: float) -> float | None:
        """
        Convert a loss in nats per token of val.bin to bits per byte of its text, which does not depend on the
        tokenizer; None: the metadata does not say how long the text is.
        """
        return bits_per_byte(val_loss, 1, self.bytes_per_token or 0)

    @property
    def documents(self) -> dict[str, DocumentWindows]:
        """The windows that begin with a document, by source; {} with another order of the data."""
        return {one.name: one.windows for one in self.sources if isinstance(one.windows, DocumentWindows)}

    def validation(self) -> dict:
        """What metrics.jsonl records of the validation text."""
        return {"val_text": self.val_text, "val_bytes": self.val_bytes, "val_tokens": len(self.val)}

    def describe(self) -> dict[str, dict]:
        """
        What a checkpoint records of the data besides the digest: `sources` for a mixture, and `documents` for
        windows that begin with a document, both by the source's name.
        """
        parts = {one.name: {"digest": one.digest, "of_1000": one.quota} for one in self.parts}
        documents = {name: windows.digest for name, windows in self.documents.items()}
        return {name: facts for name, facts in (("sources", parts), ("documents", documents)) if facts}

    def facts(self) -> dict:
        """What must be the same on all ranks, named as in messages."""
        facts = {"the data's digest": self.digest, "the data's vocabulary size": self.vocab_size}
        facts |= {f"the data's {name}": value for name, value in self.describe().items()}
        if self.further:
            facts["the digest of eval_datasets"] = {one.name: one.digest for one in self.further}
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
        eval_datasets: names of further validation sets, separated by commas, each as in find_dataset. Whether
            their ids mean what the model's ids mean is checked later, see run_vocabulary.vocabulary_for_run.
        data_order: train.py's setting, see documents.windows_of.

    Raises:
        ValueError: a file is missing, empty, too short or truncated, an id is outside the vocabulary, the
            metadata cannot be read, or the data sets of a mixture do not belong together.
    """
    weights = find_sources(name)
    metas = [read_metadata(folder) for folder in weights]
    vocabulary = common_vocabulary(metas)
    vocab_size = vocab_size or max(meta.vocab_size for meta in metas) or GPT2_VOCAB
    sources = [open_source(meta, vocab_size, block_size, data_order) for meta in metas]
    folders = [find_dataset(name, "val") for name in filter(None, map(str.strip, eval_datasets.split(",")))]
    check_names([*folders, *weights] if len(weights) > 1 else folders)
    further = [open_source(read_metadata(folder), vocab_size, block_size) for folder in folders]
    whole = mix(sources, [*weights.values()]) if len(sources) > 1 else sources[0]
    return replace(whole, vocab_size=vocab_size, vocabulary=vocabulary, further=tuple(further))


def open_source(meta: Metadata, vocab_size: int, block_size: int, data_order: str = "") -> Dataset:
    """
    Open the token files of one folder and check them, see open_dataset.

    Args:
        data_order: "": only the validation set is opened, whose ids are compared with the vocabulary later.
    """
    folder, content = meta.folder, meta.content
    names, limit = (("train", "val"), vocab_size) if data_order else (("val",), MOST_IDS)
    splits = {split: open_split(folder, split, content, vocab_size, block_size) for split in names}
    return Dataset(
        folder,
        highest=max(highest_id(tokens, limit) for tokens in splits.values()),
        digest=digest_of(splits),
        vocabulary=meta.vocabulary,
        val_bytes=content.get("val_bytes", 0),
        val_text=content.get("val_text", ""),
        windows=windows_of(folder, splits["train"], content, data_order, block_size) if data_order else None,
        **splits,
    )


def mix(sources: list[Dataset], weights: list[Fraction | None]) -> Dataset:
    """Return the mixture of several data sets. Raises ValueError if one of them would get no sequences."""
    named = {one.name: weight or len(one.train) for one, weight in zip(sources, weights, strict=True)}
    quotas, texts = quotas_of(named), [one.val_text for one in sources]
    folder = Path(" and ".join(str(one.folder) for one in sources))
    return Dataset(
        folder,
        Tokens(folder, [file for one in sources for file in one.val.files]),
        highest=max(one.highest for one in sources),
        digest=digest_of_parts([one.digest for one in sources], quotas)[:12],
        vocabulary=None,
        val_bytes=sum(one.val_bytes for one in sources) if all(one.val_bytes for one in sources) else 0,
        val_text=digest_of_parts(texts, quotas) if all(texts) else "",
        train=Tokens(folder, [file for one in sources for file in one.train.files]),
        parts=tuple(replace(one, quota=quota) for one, quota in zip(sources, quotas, strict=True)),
    )


def digest_of_parts(digests: list[str], quotas: list[int]) -> str:
    """The SHA-256 of the digests of a mixture's parts and their quotas."""
    return hashlib.sha256(json.dumps([digests, quotas]).encode()).hexdigest()


def find_sources(name: str) -> dict[Path, Fraction | None]:
    """
    Find the folders of a data set or mixture; returns {folder: weight}, sorted by the folder's name, so that
    their order in `name` does not matter. Weights are None where none are given.

    Args:
        name: as in find_dataset, or several names with weights or without, see mixture.parse_mixture.

    Raises:
        ValueError: a folder is missing, or has the same name as another one; or see parse_mixture.
    """
    parts = [(find_dataset(part), weight) for part, weight in parse_mixture(name, is_folder)]
    check_names([folder for folder, _ in parts])
    return dict(sorted(parts, key=lambda part: part[0].resolve().name))


def check_names(folders: Sequence[Path]) -> None:
    """Raise ValueError if folders have the same name, by which losses are reported."""
    names = [folder.resolve().name for folder in folders]
    if len(set(names)) < len(names):
        raise ValueError(
            f"{', '.join(map(str, folders))} have the same name, but losses are reported by the folder's "
            "name: name each only once, or rename a folder"
        )


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
                f"mixed: {problem}. Run the prepare.py of both with the same --tokenizer=, such as gpt2"
            )
    return most.vocabulary


def highest_id(tokens: Tokens, vocab_size: int) -> int:
    """
    Return the highest id in a small file, or in a thousand samples of a large file (each batch is checked
    when it is read). Raises DataError if an id is outside the vocabulary.
    """
    if len(tokens) > 2**26:
        starts, windows = samples(tokens, 1000)
        return check_ids(windows, vocab_size, tokens, starts)
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
    wrong = lowest if lowest < 0 else highest
    row, column = np.argwhere(windows == wrong)[0]
    file, _ = tokens.place_of(int(starts[row] + column))
    raise DataError(
        f"{file.path} holds token id {wrong}, but the vocabulary size is {vocab_size}: set "
        f"--vocab_size={highest + 1} or more if the tokenizer has so many ids; if not, the file or the dtype "
        "in its meta.json is wrong: write it again, without padding"
    )


def digest_of(splits: dict[str, Tokens]) -> str:
    """A digest of the lengths and of samples of the files, with which machines and runs are compared."""
    digest = hashlib.sha256()
    for tokens in splits.values():
        digest.update(len(tokens).to_bytes(8, "little"))
        digest.update(samples(tokens, 64)[1])
    return digest.hexdigest()[:12]


def samples(tokens: Tokens, n: int) -> tuple[np.ndarray, np.ndarray]:
    """n evenly spaced samples of a file: where they begin, and 4096 tokens each, or all of a shorter file."""
    starts = np.linspace(0, max(0, len(tokens) - 4096), n).astype(np.int64)
    return starts, tokens.read(starts, min(4096, len(tokens)))


def parts_of(tokens: Tokens, begin: int = 0, end: int | None = None) -> Iterator[np.ndarray]:
    """Yield the ids from `begin` to `end`, by default all, in parts (1, tokens) of at most PART."""
    end = len(tokens) if end is None else end
    for start in range(begin, end, PART):
        yield tokens.read(np.array([start]), min(PART, end - start))
