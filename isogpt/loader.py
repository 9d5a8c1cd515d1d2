"""
Which sequences optimizer step s reads, and reading them ahead of the step.

The sequences of a step are a pure function of (seed, data set, step), drawn by a counter-based generator, so that the
number of processes, the micro-batch size and restarts cannot change them. (With data_order=shuffle, a run whose batch
was changed by a resume continues after the windows that it has read.) Every rank gets the same number of rows, or
in proportion to its weight; if they do not divide evenly, padding rows carry targets of -1, which the loss ignores.
"""

import hashlib
import json
import math
import mmap
import operator
import os
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from heapq import heapify, heapreplace
from itertools import chain, count, islice, pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from isogpt import vocabulary
from isogpt.agree import is_main
from isogpt.files import load_pickle
from isogpt.mesh import Mesh
from isogpt.token_files import DTYPES, Format, formats_of, parse_dtype
from isogpt.vocabulary import Vocabulary

REPOSITORY = Path(__file__).resolve().parent.parent
GPT2_VOCAB = 50304  # for a data set without metadata: GPT-2's 50257 ids, padded to a multiple of 64
Batches = Iterator[tuple[Tensor, Tensor]]  # inputs and targets, each (rows, block_size)
PADDING = -1  # the start of a padding row
# plain values that a meta.pkl may contain besides builtin ones
ARRAYS = {"scalar", "_reconstruct"}
PICKLED = {"numpy": {"dtype", "ndarray", *DTYPES}, "numpy._core.multiarray": ARRAYS, "numpy.core.multiarray": ARRAYS,
           "collections": {"OrderedDict", "defaultdict", "Counter"},
           "builtins": {"int", "float", "str", "list", "dict", "set", "tuple"}}  # fmt: skip
OUR_KEYS = {"dtype", "vocab_size", "tokenizer", "tokenizer_size", "source"}  # of a meta.json that prepare.py wrote

# one stream of random numbers for each use, so that none depends on how much another one has drawn
TRAIN, EVAL_TRAIN, EVAL_VAL, SHUFFLE, SAMPLING = range(5)


# ---------------------------------------------------------------------------------------------------------------------
# the data set on disk


@dataclass(frozen=True)
class Dataset:
    """The two token files of `folder`, memory-mapped, and its vocabulary size, from its metadata or GPT-2's."""

    folder: Path
    train: np.ndarray  # (tokens,) of one of token_files.DTYPES
    val: np.ndarray  # (tokens,)
    vocab_size: int
    highest: int  # the highest id found when the files were checked
    digest: str  # of the files' lengths and a sample of their content, to be compared between machines
    vocabulary: Vocabulary | None = None  # what the ids mean; None if the folder does not say


def find_dataset(name: str) -> Path:
    """
    The folder of data set `name`: data/<name> in the working folder or in the repository, or a path to the folder or
    to its train.bin.

    Raises:
        ValueError: there is no train.bin in any of them.
    """
    path = Path(name).expanduser()
    if path.name in ("train.bin", "val.bin"):
        path = path.parent
    # on Windows, paths are written with both separators
    is_path = "/" in name or os.sep in name or name.startswith((".", "~"))
    places = [path] if path.is_absolute() else [Path("data") / path, REPOSITORY / "data" / path]
    if is_path and not path.is_absolute():
        places += [path, REPOSITORY / path]
    for place in places:
        if (place / "train.bin").exists():
            return place
    searched = " or ".join(dict.fromkeys(map(str, places)))
    raise ValueError(f"no train.bin in {searched}; {how_to_prepare(places)}")


def how_to_prepare(places: list[Path]) -> str:
    """What a user can do if none of these folders contains a train.bin."""
    for place in places:
        if (place / "prepare.py").exists():
            return f"run: python {place / 'prepare.py'}"
        if found := sorted(path.name for path in place.glob("*.bin")):
            return f"{place} contains {', '.join(found)}: rename the file to train on to train.bin"
    return f"prepared data sets: {', '.join(prepared_datasets()) or 'none'}"


def prepared_datasets() -> list[str]:
    """Names of the data sets that have a train.bin."""
    return sorted({p.parent.name for root in (Path("data"), REPOSITORY / "data") for p in root.glob("*/train.bin")})


def open_dataset(name: str, block_size: int, vocab_size: int = 0) -> Dataset:
    """
    Memory-map the files of a data set and check them.

    Args:
        block_size: each split must have at least block_size + 1 tokens.
        vocab_size: ids must be below it; 0: the size in the metadata.

    Raises:
        ValueError: a file is missing, empty, too short or truncated, an id is outside the vocabulary, or the metadata
            cannot be read.
    """
    folder = find_dataset(name)
    found = read_meta(folder)
    words = vocabulary.of_data(found, folder)
    known_size = vocab_size or known_vocab_size(found, words, folder)
    vocab_size = known_size or GPT2_VOCAB
    if words and words.size and words.size > vocab_size:
        problem = f"{folder} describes {words.size} token ids, but the vocabulary size is {vocab_size}"
        raise ValueError(f"{problem}: set --vocab_size={words.size} or more")
    splits = map_splits(folder, found, known_size, block_size)
    for split, tokens in splits.items():
        recorded = found.get(f"{split}_tokens", len(tokens))
        if recorded != len(tokens):  # some of the files were copied or written by themselves
            problem = f"{folder / split}.bin has {len(tokens)} tokens, but meta.json says {recorded}"
            todo = how_to_repair(folder)
            raise ValueError(f"{problem}: they come from different prepare.py runs; {todo}")
    ranges = {split: range_of_ids(tokens) for split, tokens in splits.items()}
    for split, (lowest, highest) in ranges.items():
        check_ids(highest, vocab_size, folder / f"{split}.bin", lowest)
    highest = max(highest for _, highest in ranges.values())
    content = b"".join(len(t).to_bytes(8, "little") + b"".join(samples(t, 64)) for t in splits.values())
    digest = hashlib.sha256(content).hexdigest()[:12]
    return Dataset(folder, splits["train"], splits["val"], vocab_size, highest, digest, words)


def known_vocab_size(meta: dict, words: Vocabulary | None, folder: Path) -> int:
    """
    The size of the vocabulary according to the metadata, else of the ids that have a meaning; 0 if both are unknown.
    Raises ValueError if the metadata contains something that is not a number.
    """
    found = vocabulary.vocab_size_of(meta)
    if found is None and "vocab_size" not in meta:
        return (words and words.size) or 0
    try:
        return operator.index(found)
    except TypeError:
        where = " or ".join(n for n in ("meta.json", "meta.pkl") if (folder / n).exists())
        raise ValueError(f"{folder / where}: vocab_size is {found!r}, not an integer") from None


def samples(tokens: np.ndarray, n: int) -> list[np.ndarray]:
    """n evenly spaced samples of a file: 4096 tokens each."""
    starts = np.linspace(0, max(0, len(tokens) - 4096), n).astype(np.int64)
    return [tokens[s : s + 4096] for s in starts]


def range_of_ids(tokens: np.ndarray) -> tuple[int, int]:
    """
    The lowest and the highest id in a file: of all of it if it is small, else of a thousand samples (each batch is
    checked again when it is read).
    """
    parts = np.array_split(tokens, 64) if len(tokens) <= 2**26 else samples(tokens, 1000)
    lowest, highest = [], []
    for part in parts:
        if len(part):
            lowest.append(int(part.min()))
            highest.append(int(part.max()))
            release_pages(tokens)
    return min(lowest), max(highest)


def release_pages(tokens: np.ndarray) -> None:
    """
    Take the pages of a mapped file that were read out of this process's resident set, which would otherwise grow up to
    the size of the file. They stay in the system's page cache.
    """
    if isinstance(tokens.base, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):  # not on Windows
        tokens.base.madvise(mmap.MADV_DONTNEED)


class DataError(ValueError):
    """The data is not what the check at the start of the run found."""


def check_ids(highest: int, vocab_size: int, path: Path, lowest: int = 0) -> None:
    """Raise DataError if an id is outside the vocabulary: on a GPU the embedding would fail with an opaque error."""
    if lowest < 0:
        raise DataError(f"{path} holds token id {lowest}: remove the ids below 0, such as padding, and write it again")
    if highest >= vocab_size:
        advice = f"set --vocab_size={highest + 1} or more, or run prepare.py again (meta.json may be wrong)"
        raise DataError(f"{path} holds token id {highest}, but the vocabulary size is {vocab_size}: {advice}")


def how_to_repair(folder: Path) -> str:
    """What a user can do about missing or damaged token files."""
    if (folder / "prepare.py").exists():
        return f"run: python {folder / 'prepare.py'}"
    return f"write train.bin and val.bin in {folder} again"


def map_splits(folder: Path, meta: dict, vocab_size: int, block_size: int) -> dict[str, np.ndarray]:
    """
    train.bin and val.bin as memory-mapped arrays, by split; prints what was concluded about their format (rank 0).

    Args:
        vocab_size: of the metadata or the settings; 0: unknown.

    Raises:
        ValueError: a file is missing, empty, truncated, too short or of an unknown format.
    """
    paths = {split: folder / f"{split}.bin" for split in ("train", "val")}
    for path in paths.values():
        if not path.exists():
            raise ValueError(f"{path} does not exist; {how_to_get_val(folder)}")
        if path.stat().st_size == 0:
            raise ValueError(f"{path} is empty; {how_to_repair(folder)}")
    declared = None
    if "dtype" in meta:
        where = " or ".join(name for name in ("meta.json", "meta.pkl") if (folder / name).exists())
        declared = parse_dtype(meta["dtype"], folder / where)
    formats, notes = formats_of(list(paths.values()), declared, vocab_size)
    for note in notes if is_main() else []:
        print(f"note: {note}", flush=True)
    return {split: map_tokens(path, format, block_size)
            for (split, path), format in zip(paths.items(), formats, strict=True)}  # fmt: skip


def how_to_get_val(folder: Path) -> str:
    """What a user can do about a missing val.bin."""
    others = [name for name in ("validation.bin", "valid.bin", "dev.bin", "test.bin") if (folder / name).exists()]
    if others:
        return f"rename {folder / others[0]} to val.bin"
    if (folder / "prepare.py").exists():
        return f"run: python {folder / 'prepare.py'}, or take it from the end of train.bin: {split_command(folder)}"
    return f"take it from the end of train.bin: {split_command(folder)}"


def split_command(folder: Path) -> str:
    """The command that divides a train.bin."""
    return f"python {os.path.relpath(REPOSITORY / 'data' / 'split.py')} {folder}"


def map_tokens(path: Path, format: Format, block_size: int) -> np.ndarray:
    """The file as a memory-mapped array. Raises ValueError if it is truncated or too short."""
    size, item = path.stat().st_size - format.offset, np.dtype(format.dtype).itemsize
    if size % item:
        problem = f"{path} has {size} bytes, not a multiple of {item} ({format.dtype}): it is truncated"
        raise ValueError(f"{problem}, or of a different dtype; {how_to_repair(path.parent)}")
    tokens = size // item
    if tokens < block_size + 1:
        problem = f"{path} has {tokens} tokens, but block_size {block_size} needs at least {block_size + 1}"
        shorter = f"set --block_size={tokens - 1} or less, or " if tokens > 1 else ""
        raise ValueError(f"{problem}: {shorter}use more text")
    return np.memmap(path, dtype=format.dtype, mode="r", offset=format.offset)


def read_meta(folder: Path) -> dict:
    """
    A data set's metadata: meta.json (ours) merged over meta.pkl (nanoGPT's, with stoi and itos); empty if there is
    neither. From a meta.json that prepare.py did not write, only the dtype and the vocabulary are taken. The pickle may
    hold plain values only: nothing in it runs.

    Raises:
        ValueError: one of them cannot be read.
    """
    meta = {}
    for path in (folder / "meta.pkl", folder / "meta.json"):
        if not path.exists():
            continue
        try:
            if not path.is_file():
                raise OSError("it is not a regular file")
            found = load_pickle(path, PICKLED) if path.suffix == ".pkl" else json.loads(path.read_text())
            if not isinstance(found, dict):
                raise TypeError(f"it holds a {type(found).__name__}, not a dict")
        except Exception as e:  # a damaged pickle raises nearly anything
            raise ValueError(f"{path} cannot be read: {e}") from e
        if path.suffix == ".json" and not found.keys() >= OUR_KEYS:
            found = {key: value for key, value in found.items() if key == "dtype" or vocabulary.is_about_ids(key)}
        meta |= found
    return meta


# ---------------------------------------------------------------------------------------------------------------------
# which sequences


def random_bits(seed: int, stream: int, step: int, n: int) -> np.ndarray:
    """
    n random 64-bit numbers that depend on the arguments alone: Philox (Salmon et al. 2011), with the step as the high
    word of its counter. Raw bits, since numpy guarantees that those do not change between versions.
    """
    return np.random.Philox(key=[seed, stream], counter=[0, 0, 0, step]).random_raw(n)


def random_windows(n_tokens: int, block_size: int, seed: int, stream: int, step: int, n: int) -> np.ndarray:
    """Starts (n,) of windows at any position, with replacement, as in nanoGPT."""
    return (random_bits(seed, stream, step, n) % np.uint64(n_tokens - block_size)).astype(np.int64)


def shuffled_windows(n_tokens: int, block_size: int, seed: int, step: int, n: int, shift: int = 0) -> np.ndarray:
    """
    Starts (n,) of the step's windows if every window is read once per epoch, in a new order each time. `shift`: by how
    many windows more than step * n the run has read before, because the batch had a different size.
    """
    windows = (n_tokens - 1) // block_size
    epochs, places = np.divmod(shift + step * n + np.arange(n), windows)
    orders = [epoch_order(windows, seed, int(e))[places[epochs == e]] for e in np.unique(epochs)]
    return np.concatenate(orders) * block_size


@lru_cache(maxsize=2)
def epoch_order(windows: int, seed: int, epoch: int) -> np.ndarray:
    """A permutation of the windows: 8 bytes per window, 70 MB for OpenWebText at block_size 1024."""
    return np.argsort(random_bits(seed, SHUFFLE, epoch, windows), kind="stable")


# ---------------------------------------------------------------------------------------------------------------------
# this rank's share


@dataclass(frozen=True)
class Share:
    """
    How a batch of `sequences` is divided: data rank r runs `micro_steps` micro-batches of rows_of[r] rows. Islands get
    sequences that follow each other in the batch, and the ranks of an island divide these.
    """

    sequences: int
    data_rank: int
    micro_steps: int
    rows_of: tuple[int, ...]  # by data rank
    islands: tuple[int, ...] = ()  # the sequences of each; (): there are none

    @property
    def island_sequences(self) -> int:
        """How many sequences this rank's island has; without islands all of the batch."""
        return len(self.island()[0])

    def island(self) -> tuple[range, tuple[int, ...], int]:
        """This rank's island: its sequences' places in the batch, the rows of its ranks, this rank's number in it."""
        counts = self.islands or (self.sequences,)
        size = len(self.rows_of) // len(counts)
        number, rank = divmod(self.data_rank, size)
        start = sum(counts[:number])
        places = range(start, start + counts[number])
        return places, self.rows_of[number * size : (number + 1) * size], rank

    @property
    def rows(self) -> int:
        """This rank's rows of a micro-step."""
        return self.rows_of[self.data_rank]

    def pick(self, starts: np.ndarray, micro_step: int) -> np.ndarray:
        """
        This rank's rows (rows,) of one micro-step, from the starts of the global batch; PADDING beyond the end of the
        batch, or of the island's part of it.
        """
        places, rows_of, rank = self.island()
        first = micro_step * sum(rows_of) + sum(rows_of[:rank])
        mine = starts[places.start : places.stop][first : first + self.rows]
        return np.pad(mine, (0, self.rows - len(mine)), constant_values=PADDING)

    def padding(self) -> int:
        """How many rows of the global batch are padding."""
        return self.micro_steps * sum(self.rows_of) - self.sequences


def share_of(sequences: int, data_rank: int, data_size: int, batch_size: int, pp: int = 1,
             weights: tuple[float, ...] = (), islands: int = 1) -> Share:  # fmt: skip
    """
    One rank's share: the same number of micro-steps and rows on every rank, as few micro-steps as batch_size allows and
    then as few rows. 48 sequences on 7 ranks at batch_size 12 are one micro-step of 7 rows, one of which is padding.
    With a pipeline of `pp` ranks, the number of micro-steps is a multiple of pp. With `weights`, by data rank, that
    differ, rows are in proportion to them: see `divide_rows`.

    The sequences of an island depend on the batch, the number of islands and the sums of their ranks' weights, so that
    neither batch_size nor the number of ranks in an island changes what it learns.
    """
    if len(set(weights)) > 1:
        return weighted_share(sequences, data_rank, batch_size, weights, islands)
    most = -(-sequences // data_size)
    micro_steps = -(-most // batch_size)
    micro_steps = -(-micro_steps // pp) * pp
    bounds = [i * sequences // islands for i in range(islands + 1)]
    counts = tuple(end - start for start, end in pairwise(bounds)) if islands > 1 else ()
    return Share(sequences, data_rank, micro_steps, (-(-most // micro_steps),) * data_size, counts)


def weighted_share(sequences: int, data_rank: int, batch_size: int, weights: tuple[float, ...], islands: int) -> Share:
    """`share_of` for weights that differ. All islands run as many micro-steps as the one that needs most."""
    size = len(weights) // islands
    by_island = [weights[i * size : (i + 1) * size] for i in range(islands)]
    counts = (sequences,)
    if islands > 1:
        _, counts = divide_rows(sequences, tuple(map(sum, by_island)), sequences)
    micro_steps = max(divide_rows(n, own, batch_size)[0] for n, own in zip(counts, by_island, strict=True))
    rows = [divide_rows(n, own, batch_size, micro_steps)[1] for n, own in zip(counts, by_island, strict=True)]
    return Share(sequences, data_rank, micro_steps, tuple(chain(*rows)), counts if islands > 1 else ())


@lru_cache
def divide_rows(sequences: int, weights: tuple[float, ...], batch_size: int,
                least: int = 1) -> tuple[int, tuple[int, ...]]:  # fmt: skip
    """
    The fewest micro-steps, but at least `least`, for which no rank has more than batch_size rows in proportion to its
    weight, and the rows of each rank, at least 1. A micro-step takes as long as the largest rows / weight: each row
    goes to the rank for which that becomes the smallest. 48 sequences for weights 2, 1 at batch_size 12 are 3
    micro-steps of 11 and 5 rows.
    """
    for micro_steps in count(max(least, -(-sequences // (batch_size * len(weights))))):
        rows, times = [1] * len(weights), [(2 / weight, rank) for rank, weight in enumerate(weights)]
        heapify(times)  # with one more row, by rank
        for _ in range(len(weights), -(-sequences // micro_steps)):
            _, rank = times[0]
            rows[rank] += 1
            heapreplace(times, ((rows[rank] + 1) / weights[rank], rank))
        if max(rows) <= batch_size:
            return micro_steps, tuple(rows)


def weights_of(shares: str, data_size: int | None = None) -> tuple[float, ...]:
    """
    The weights in a list such as 2,1,1, one for each of data_size ranks, if that is known; () for equal and auto.

    Raises:
        ValueError: these are not that many positive numbers.
    """
    if shares in ("equal", "auto"):
        return ()
    try:
        weights = tuple(map(float, shares.split(",")))
    except ValueError:
        weights = (math.nan,)
    if not all(0 < weight < math.inf for weight in weights):
        raise ValueError(f"shares is {shares!r}; possible are equal, auto, and positive numbers, one for each "
                         "data-parallel rank, such as 2,1,1")  # fmt: skip
    if data_size not in (None, len(weights)):
        if data_size == 1:
            raise ValueError(f"shares is {shares!r}, but there is only one data-parallel rank: set --shares=equal, or "
                             f"start more processes")  # fmt: skip
        example = show_weights((*weights, *(1.0,) * data_size)[:data_size])
        raise ValueError(f"shares is {shares!r}, {len(weights)} numbers for {data_size} data-parallel ranks: set one "
                         f"for each, such as --shares={example}")  # fmt: skip
    return weights


def show_weights(weights: tuple[float, ...]) -> str:
    """Weights as they are typed."""
    return ",".join(f"{weight:g}" for weight in weights)


# ---------------------------------------------------------------------------------------------------------------------
# reading


def read_rows(tokens: np.ndarray, starts: np.ndarray, block_size: int,
              positions: Tensor | None = None) -> tuple[Tensor, Tensor]:  # fmt: skip
    """
    Inputs and targets, each (rows, block_size) int64 on the CPU, or only the given positions of them; a padding row is
    zeros with targets of -1.
    """
    padding = starts == PADDING
    windows = tokens[np.where(padding, 0, starts)[:, None] + np.arange(block_size + 1)].astype(np.int64)
    x, y = windows[:, :-1].copy(), windows[:, 1:].copy()
    x[padding], y[padding] = 0, -1
    x, y = torch.from_numpy(x), torch.from_numpy(y)
    return (x, y) if positions is None else (x[:, positions], y[:, positions])


@dataclass
class Reader:
    """Reads this rank's share of the training steps and of the evaluations."""

    data: Dataset
    order: str  # random or shuffle
    seed: int
    block_size: int
    sequences: int  # per step, over all ranks
    mesh: Mesh
    micro_batch: int
    vocab_size: int  # the model's
    device: torch.device
    weights: tuple[float, ...] = ()  # of the data ranks' shares; (): equal
    shift: int = 0  # see shuffled_windows

    @property
    def share(self) -> Share:
        """This rank's share of a step."""
        return self.share_of_rank(self.mesh.rank)

    def share_of_rank(self, rank: int) -> Share:
        """A rank's share of a step."""
        data_rank = self.mesh.data_rank_of(rank)
        return share_of(self.sequences, data_rank, self.mesh.data_size, self.micro_batch, self.mesh.pp, self.weights,
                        self.mesh.islands)  # fmt: skip

    def starts(self, step: int) -> np.ndarray:
        """The windows (sequences,) of a training step, for the global batch."""
        n_tokens = len(self.data.train)
        if self.order == "shuffle":
            return shuffled_windows(n_tokens, self.block_size, self.seed, step, self.sequences, self.shift)
        return random_windows(n_tokens, self.block_size, self.seed, TRAIN, step, self.sequences)

    def train(self, step: int, position: int, skipped: Container[int] = ()) -> Batches:
        """
        This rank's micro-batches from `step` on.

        Args:
            position: the tokens that the run has read before.
            skipped: steps that are left out.
        """
        self.shift = position // self.block_size - step * self.sequences
        steps = (number for number in count(step) if number not in skipped)
        return self.read(self.data.train, self.starts, steps, self.share)

    def evaluation(self, split: str, sequences: int) -> Batches:
        """
        This rank's micro-batches of an evaluation, which reads the same sequences every time. Ranks that compute a
        model together need the same number of them: if data cannot be read, padding follows, and then the error.

        Raises:
            DataError: after the last micro-batch, if the file was truncated or an id is outside the vocabulary.
        """
        tokens, stream = (self.data.train, EVAL_TRAIN) if split == "train" else (self.data.val, EVAL_VAL)
        starts = random_windows(len(tokens), self.block_size, self.seed, stream, 0, sequences)
        share = share_of(sequences, self.mesh.data_rank, self.mesh.data_size, self.micro_batch, weights=self.weights)
        count_read = 0
        try:
            for batch in self.read(tokens, lambda _: starts, [0], share):
                yield batch
                count_read += 1
        except DataError:
            no_tokens, no_starts = np.zeros(self.block_size + 1, np.uint16), np.full(sequences, PADDING)
            padding = self.read(no_tokens, lambda _: no_starts, [0], share)
            yield from islice(padding, share.micro_steps - count_read)
            raise

    def read(self, tokens: np.ndarray, starts_of: Callable[[int], np.ndarray], steps: Iterable[int],
             share: Share) -> Batches:  # fmt: skip
        """
        The micro-batches (x, y), each (rows, block_size) on the device, of the given steps in order. A thread reads two
        ahead, so that a slow disk does not delay a step, and the next one is copied to the device while this one is
        used.

        Args:
            starts_of: the starts of a step's windows, for the global batch.

        Raises:
            DataError: an id is outside the vocabulary.
        """
        path = Path(getattr(tokens, "filename", None) or "the data")
        end_of_file = getattr(tokens, "offset", 0) + tokens.nbytes
        positions = self.mesh.own_positions(self.block_size)

        is_pinned = self.device.type == "cuda"  # a copy that nobody waits for needs memory that stays: not on MPS

        def read_one(step: int, micro_step: int) -> tuple[Tensor, Tensor]:
            if path.exists() and path.stat().st_size < end_of_file:  # reading beyond the end of the file is a SIGBUS
                raise DataError(f"{path} has been truncated since the start of the run")
            x, y = read_rows(tokens, share.pick(starts_of(step), micro_step), self.block_size, positions)
            check_ids(max(int(x.max()), int(y.max())), self.vocab_size, path, int(x.min()))
            release_pages(tokens)
            # copies to a GPU from memory that is not pinned block the CPU
            return (x.pin_memory(), y.pin_memory()) if is_pinned else (x, y)

        starts_of = lru_cache(maxsize=1)(starts_of)  # draw once for all micro-steps of a step
        jobs = ((step, micro_step) for step in steps for micro_step in range(share.micro_steps))
        copied = (tuple(t.to(self.device, non_blocking=is_pinned) for t in rows) for rows in in_thread(read_one, jobs))
        for current, _ in pairwise(chain(copied, [None])):
            yield current

    def padding_batch(self) -> tuple[Tensor, Tensor]:
        """A micro-batch of padding rows, in the shape of a training micro-batch."""
        starts, tokens = np.full(self.sequences, PADDING), np.zeros(self.block_size + 1, np.uint16)
        return next(self.read(tokens, lambda _: starts, [0], self.share))


def in_thread(work: Callable, jobs: Iterable[tuple], ahead: int = 2) -> Iterator:
    """work(*job) for each job, in order, computed by a thread up to `ahead` jobs in advance."""
    with ThreadPoolExecutor(1, thread_name_prefix="loader") as thread:
        waiting = deque()
        for job in jobs:
            waiting.append(thread.submit(work, *job))
            if len(waiting) > ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
