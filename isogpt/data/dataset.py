"""A data set, or a mixture of several: its tokens are opened and checked."""

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

import numpy as np

from isogpt.data.data_folder import find_dataset, open_split, read_meta
from isogpt.data.documents import windows_of
from isogpt.data.mixture import PER, find_sources, quotas_of
from isogpt.data.token_files import DataError, Tokens
from isogpt.data.vocabulary import Vocabulary, vocabulary_of_data
from isogpt.data.windows import Windows

GPT2_VOCAB = 50304  # for a data set without metadata: GPT-2's 50257 ids, padded to a multiple of 64
MOST_IDS = 2**24  # more than any tokenizer uses
PART = 2**18  # ids that are read at a time where all ids of a file are read
RUN = 256  # ids in succession, which are hardly ever the same one in a text


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
    windows: Windows | None = None  # of train, of which every order but random reads each once per epoch
    parts: tuple["Dataset", ...] = ()  # of a mixture
    quotas: tuple[int, ...] = (PER,)  # how many of each PER sequences are of each source
    vocab_size: int = 0  # of the run: from the setting, the metadata, or GPT-2's
    further: tuple["Dataset", ...] = ()  # validation sets that are evaluated too
    notes: tuple[str, ...] = ()  # what a user should know about the files, also those of parts and further

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.folder.resolve().name

    @property
    def sources(self) -> tuple["Dataset", ...]:
        """The parts of a mixture, or this data set alone."""
        return self.parts or (self,)

    @property
    def begins(self) -> np.ndarray:
        """The position in `train` at which each source begins."""
        return np.cumsum([0, *(len(source.train) for source in self.sources[:-1])])

    @property
    def named(self) -> tuple["Dataset", ...]:
        """The validation sets whose losses are reported by name: of a mixture's parts, and further ones."""
        return self.parts + self.further

    @property
    def splits(self) -> dict[str, Tokens]:
        """What an evaluation reads: train, val (not of a mixture), and val/NAME for each in `named`."""
        splits = {"train": self.train}
        if not self.parts:
            splits["val"] = self.val
        return splits | {f"val/{one.name}": one.val for one in self.named}

    def mean(self, values: Iterable[float]) -> float:
        """The mean of a value of each source, weighted by their quotas."""
        return sum(quota / PER * value for quota, value in zip(self.quotas, values, strict=True))

    def val_loss(self, losses: dict[str, float]) -> float:
        """The validation loss, from the losses of `splits`; of a mixture, their mean."""
        names = [f"val/{one.name}" for one in self.parts] or ["val"]
        return self.mean(losses[name] for name in names)

    @property
    def bytes_per_token(self) -> float | None:
        """The mean number of bytes of a token of val.bin; None: the metadata does not say."""
        if not self.val_bytes:
            return None
        return self.mean(one.val_bytes / len(one.val) for one in self.sources)

    def bits_per_byte(self, val_loss: float) -> float | None:
        """
        Convert a loss in nats per token of val.bin to bits per byte of its text, which does not depend on the
        tokenizer; None: the metadata does not say how long the text is.
        """
        return bits_per_byte(val_loss, self.bytes_per_token)

    def validation(self) -> dict:
        """What metrics.jsonl records of the validation text."""
        return {"val_text": self.val_text, "val_bytes": self.val_bytes, "val_tokens": len(self.val)}

    def describe(self) -> dict[str, dict]:
        """
        What a checkpoint records of the data besides the digest: `sources` for a mixture, and `documents` for
        windows that begin with a document, both by the source's name.
        """
        quotas = zip(self.parts, self.quotas, strict=False)
        sources = {one.name: {"digest": one.digest, "of_1000": quota} for one, quota in quotas}
        documents = {one.name: one.windows.digest for one in self.sources if one.windows.digest}
        facts = {"sources": sources, "documents": documents}
        return {name: value for name, value in facts.items() if value}

    def facts(self) -> dict:
        """What must be the same on all ranks, named as in messages."""
        facts = {"digest": self.digest, "vocabulary size": self.vocab_size, **self.describe()}
        facts = {f"the data's {name}": value for name, value in facts.items()}
        further = {one.name: one.digest for one in self.further}
        return facts | {"the digest of eval_datasets": further}


def bits_per_byte(loss: float, bytes_per_token: float | None) -> float | None:
    """Convert a loss in nats per token to bits per byte of the text; None if its length is not known."""
    return loss / math.log(2) / bytes_per_token if bytes_per_token else None


def open_dataset(
    name: str, block_size: int, vocab_size: int = 0, eval_datasets: str = "", data_order: str = "random"
) -> Dataset:
    """
    Open the files of a data set or of a mixture, and check them.

    Args:
        name: see mixture.find_sources.
        block_size: each split must contain at least block_size + 1 tokens.
        vocab_size: ids must be below this number; 0: the size in the metadata, the largest of a mixture's.
        eval_datasets: names of further validation sets, separated by commas, each as in find_dataset.
        data_order: train.py's setting, see documents.windows_of.

    Raises:
        ValueError: a file is missing, empty, too short or truncated, an id is outside the vocabulary, or the
            metadata cannot be read. Whether the ids of all data sets mean the same is checked later, see
            run_vocabulary.vocabulary_for_run.
    """
    folders, weights = zip(*find_sources(name), strict=True)
    sizes = [read_meta(folder).get("vocab_size", 0) for folder in folders]
    vocab_size = vocab_size or max(sizes) or GPT2_VOCAB
    sources = [open_source(folder, vocab_size, block_size, data_order) for folder in folders]
    whole = mix(sources, weights) if len(sources) > 1 else sources[0]
    further = []
    for other in filter(None, map(str.strip, eval_datasets.split(","))):
        folder = find_dataset(other, "val")
        further.append(open_source(folder, MOST_IDS, block_size))
    notes = [note for one in (*sources, *further) for note in one.notes]
    data = replace(whole, vocab_size=vocab_size, further=tuple(further), notes=tuple(notes))
    if len({one.name for one in data.named}) < len(data.named):
        folders = ", ".join(str(one.folder) for one in data.named)
        raise ValueError(f"{folders} have the same name, by which losses are reported: rename one")
    return data


def open_source(folder: Path, vocab_size: int, block_size: int, data_order: str = "") -> Dataset:
    """
    Open the token files of one folder and check them, see open_dataset.

    Args:
        data_order: "": only the validation set is opened.
    """
    meta = read_meta(folder)
    names = ("train", "val") if data_order else ("val",)
    splits = {split: open_split(folder, split, meta, block_size) for split in names}
    checked = [look_at(tokens, vocab_size) for tokens in splits.values()]
    return Dataset(
        folder,
        highest=max(highest for highest, _ in checked),
        notes=tuple(note for _, note in checked if note),
        digest=digest_of(splits),
        vocabulary=vocabulary_of_data(meta, folder),
        val_bytes=meta.get("val_bytes", 0),
        val_text=meta.get("val_text", ""),
        windows=windows_of(folder, meta, len(splits.get("train", ())), data_order, block_size),
        **splits,
    )


def mix(sources: list[Dataset], weights: Sequence[Fraction | None]) -> Dataset:
    """Return the mixture of several data sets. Raises ValueError if one of them would get no sequences."""
    lengths = [len(one.train) for one in sources]
    quotas = quotas_of([weight or n for weight, n in zip(weights, lengths, strict=True)])
    known = [one.vocabulary for one in sources if one.vocabulary]
    sizes = [one.val_bytes for one in sources]
    texts = [one.val_text for one in sources]
    return Dataset(
        Path(" and ".join(str(one.folder) for one in sources)),
        val=Tokens([file for one in sources for file in one.val.files]),
        highest=max(one.highest for one in sources),
        digest=digest_of_parts([one.digest for one in sources], quotas)[:12],
        # the one with the most ids; how many tiktoken's have is not known
        vocabulary=max(known, key=lambda one: (one.kind != "unknown", one.size), default=None),
        val_bytes=sum(sizes) if all(sizes) else 0,
        val_text=digest_of_parts(texts, quotas) if all(texts) else "",
        train=Tokens([file for one in sources for file in one.train.files]),
        parts=tuple(sources),
        quotas=tuple(quotas),
    )


def digest_of_parts(digests: list[str], quotas: list[int]) -> str:
    """The SHA-256 of the digests of a mixture's parts and their quotas."""
    text = json.dumps([digests, quotas])
    return hashlib.sha256(text.encode()).hexdigest()


# ------------------------------------------------------------------------------------------------------------
# the ids


def look_at(tokens: Tokens, vocab_size: int) -> tuple[int, str]:
    """
    Look at a thousand samples, which are all ids of a file of up to four million (each batch is checked when
    it is read).

    Returns:
        the highest id, and a note if more than one percent of the runs of RUN ids are a single id: a file
        that was allocated at once, as nanoGPT's scripts do, and written in part, ends with zeros.

    Raises:
        DataError: an id is outside the vocabulary.
    """
    starts, windows = samples(tokens, 1000)
    highest = check_ids(windows, vocab_size, tokens, starts)
    runs = windows[:, : windows.shape[1] // RUN * RUN].reshape(len(windows), -1, RUN)
    is_single = (runs == runs[:, :, :1]).all(axis=2)
    if is_single.sum() <= is_single.size / 100:
        return highest, ""
    row, column = np.argwhere(is_single)[0]
    file, _ = tokens.place_of(int(starts[row] + column * RUN))
    found = f"in {is_single.mean():.0%} of the samples of {file.path}, id {runs[row, column, 0]} is repeated"
    return highest, f"{found} {RUN} times: prepare the data set again if it was only written in part"


def check_ids(windows: np.ndarray, vocab_size: int, tokens: Tokens, starts: np.ndarray) -> int:
    """
    Return the highest id in windows (len(starts), length) of `tokens`. Raises DataError if an id is outside
    the vocabulary: on a GPU the embedding would fail with an opaque error.
    """
    lowest, highest = int(windows.min()), int(windows.max())
    if lowest >= 0 and highest < vocab_size:
        return highest
    is_outside = (windows < 0) | (windows >= vocab_size)
    row, column = np.argwhere(is_outside)[0]
    file, _ = tokens.place_of(int(starts[row] + column))
    problem = f"holds token id {windows[row, column]}, but the vocabulary size is {vocab_size}"
    advice = f"set --vocab_size={highest + 1}, or write the file again"
    raise DataError(f"{file.path} {problem}: {advice}")


def digest_of(splits: dict[str, Tokens]) -> str:
    """A digest of the lengths and of samples of the files, with which machines and runs are compared."""
    digest = hashlib.sha256()
    for tokens in splits.values():
        digest.update(len(tokens).to_bytes(8, "little"))
        digest.update(samples(tokens, 64)[1])
    return digest.hexdigest()[:12]


def samples(tokens: Tokens, n: int) -> tuple[np.ndarray, np.ndarray]:
    """n evenly spaced samples of a file: where they begin, and 4096 tokens each, or all of a shorter file."""
    length = min(4096, len(tokens))
    starts = np.linspace(0, len(tokens) - length, n).astype(np.int64)
    return starts, tokens.read(starts, length)


def parts_of(tokens: Tokens, begin: int = 0, end: int | None = None) -> Iterator[np.ndarray]:
    """Yield the ids from `begin` to `end`, by default all, in parts (1, tokens) of at most PART."""
    end = len(tokens) if end is None else end
    for start in range(begin, end, PART):
        yield tokens.read(np.array([start]), min(PART, end - start))
