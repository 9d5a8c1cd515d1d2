"""
Which sequences optimizer step s reads, and reading them ahead of it.

DESIGN.md, law 1: the sequences of a step are a pure function of (seed, data set, step), drawn by a counter-based
generator, so that the number of processes, the micro-batch and restarts cannot change them. Each rank takes an even
share of them by construction; where they do not divide, the missing rows carry targets of -1.
"""

import hashlib
import json
import operator
import os
import pickle
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

HERE = Path(__file__).resolve().parent
GPT2_VOCAB = 50304  # what a data set without metadata is taken for: GPT-2's 50257 ids, padded to a multiple of 64
MISSING = -1  # the start of a row that is not there

# one stream of random numbers for each use, so that none depends on how much another one drew
TRAIN, EVAL_TRAIN, EVAL_VAL, SHUFFLE = range(4)


# ---------------------------------------------------------------------------------------------------------------------
# the data set on disk


@dataclass(frozen=True)
class Dataset:
    """The two token files of `folder`, mapped; what its metadata says of the vocabulary, else GPT-2's."""

    folder: Path
    train: np.ndarray  # (tokens,) uint16 or uint32
    val: np.ndarray  # (tokens,)
    vocab_size: int
    highest: int  # the highest id that was seen in checking the files
    digest: str  # of the files' lengths and a sample of them: ranks on other machines should have the same


def find_dataset(name: str) -> Path:
    """The folder of data set `name`: a path, or data/<name> in the working folder, else beside this file."""
    places = [Path("data") / name, HERE / "data" / name] + [Path(name)] * (os.sep in name)
    places = list(dict.fromkeys(places))  # an absolute path is the same in all of them
    for place in places:
        if (place / "train.bin").exists():
            return place
    prepare = next((p / "prepare.py" for p in places if (p / "prepare.py").exists()), None)
    todo = f"run: python {prepare}" if prepare else f"prepared ones: {', '.join(prepared_datasets()) or 'none'}"
    raise ValueError(f"no train.bin in {' or '.join(map(str, places))}; {todo}")


def prepared_datasets() -> list[str]:
    """Names of the data sets that can be trained on as they are."""
    return sorted({p.parent.name for root in (Path("data"), HERE / "data") for p in root.glob("*/train.bin")})


def open_dataset(name: str, block_size: int, vocab_size: int = 0) -> Dataset:
    """
    Map a data set's files and check them.

    Args:
        block_size: each split must hold at least one window of it and the token after.
        vocab_size: ids must be below it; 0 takes the metadata's.

    Raises:
        ValueError: a file is missing, empty, too short or of a length that its type does not divide, an id is beyond
            the vocabulary, or the metadata cannot be read.
    """
    folder = find_dataset(name)
    meta = read_meta(folder)
    try:
        vocab_size = vocab_size or operator.index(meta.get("vocab_size", GPT2_VOCAB))
    except TypeError:
        where = " or ".join(n for n in ("meta.json", "meta.pkl") if (folder / n).exists())
        raise ValueError(f"{folder / where}: vocab_size is {meta['vocab_size']!r}, not a whole number") from None
    if meta.get("dtype", "uint16") not in ("uint16", "uint32"):
        raise ValueError(f"{folder / 'meta.json'}: dtype is {meta['dtype']!r}, possible are uint16 and uint32")
    splits = {s: map_tokens(folder / f"{s}.bin", meta.get("dtype", "uint16"), block_size) for s in ("train", "val")}
    for split, tokens in splits.items():
        said = meta.get(f"{split}_tokens", len(tokens))
        if said != len(tokens):  # a prepare.py killed between its renames leaves files of two data sets
            raise ValueError(
                f"{folder / split}.bin has {len(tokens)} tokens, its metadata says {said}: they are not of one make; "
                f"run: python {folder / 'prepare.py'}"
            )
    highest = {split: highest_id(tokens) for split, tokens in splits.items()}
    for split in splits:
        check_ids(highest[split], vocab_size, folder / f"{split}.bin")
    digest = hashlib.sha256(b"".join(sample(tokens) for tokens in splits.values())).hexdigest()[:12]
    return Dataset(folder, splits["train"], splits["val"], vocab_size, max(highest.values()), digest)


def sample(tokens: np.ndarray) -> bytes:
    """The length of a file and 64 stretches of it."""
    starts = np.linspace(0, max(0, len(tokens) - 4096), 64).astype(np.int64)
    return len(tokens).to_bytes(8, "little") + b"".join(tokens[s : s + 4096].tobytes() for s in starts)


def highest_id(tokens: np.ndarray) -> int:
    """
    The highest id in a file: of all of it where reading it takes no time, else of a thousand stretches (each batch is
    checked again as it is read).
    """
    if len(tokens) <= 2**26:
        return int(tokens.max())
    starts = np.linspace(0, len(tokens) - 4096, 1000).astype(np.int64)
    return max(int(tokens[s : s + 4096].max()) for s in starts)


class DataError(ValueError):
    """What is read in the middle of a run is not what the check at its start took it for."""


def check_ids(highest: int, vocab_size: int, path: Path) -> None:
    """Raise ValueError where an id is beyond the vocabulary (the embedding would crash, on a GPU without a word)."""
    if highest >= vocab_size:
        raise DataError(
            f"{path} holds token id {highest}, but the vocabulary has {vocab_size}: set --vocab_size={highest + 1} or "
            f"more, or prepare the data again (its meta.json says vocabulary and dtype)"
        )


def map_tokens(path: Path, dtype: str, block_size: int) -> np.ndarray:
    """The file as an array, not read but mapped. Raises ValueError where it cannot be what it should be."""
    todo = f"run: python {path.parent / 'prepare.py'}"
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        raise ValueError(f"{path} is not there; {todo}") from None
    item = np.dtype(dtype).itemsize
    if size == 0:
        raise ValueError(f"{path} is empty; {todo}")
    if size % item:
        raise ValueError(f"{path} has {size} bytes, not a multiple of {item} ({dtype}): it is cut short; {todo}")
    if size // item < block_size + 1:
        raise ValueError(
            f"{path} holds {size // item} tokens; a block_size of {block_size} needs {block_size + 1} at least: "
            f"set --block_size={size // item - 1} or less, or take more text"
        )
    return np.memmap(path, dtype=dtype, mode="r")


def read_meta(folder: Path) -> dict:
    """
    A data set's metadata: meta.json (ours), with meta.pkl (nanoGPT's, which holds stoi and itos) underneath; empty
    where there is neither. The pickle can hold plain values only: nothing in it runs.
    """
    meta = {}
    if (folder / "meta.pkl").exists():
        with open(folder / "meta.pkl", "rb") as f:
            try:
                meta = PlainUnpickler(f).load()
            except Exception as e:  # a broken pickle raises nearly anything
                raise ValueError(f"{folder / 'meta.pkl'} cannot be read: {e}") from e
        if not isinstance(meta, dict):
            raise ValueError(f"{folder / 'meta.pkl'} holds a {type(meta).__name__}, not a dict")
    if (folder / "meta.json").exists():
        try:
            meta |= json.loads((folder / "meta.json").read_text())
        except (ValueError, TypeError) as e:
            raise ValueError(f"{folder / 'meta.json'} cannot be read: {e}") from e
    return meta


class PlainUnpickler(pickle.Unpickler):
    """Reads builtin values and numpy numbers; a pickle that names anything else to call is refused."""

    def find_class(self, module: str, name: str) -> object:
        if (module.removesuffix("._core.multiarray").removesuffix(".core.multiarray"), name) in (
            ("numpy", "scalar"),
            ("numpy", "dtype"),
        ):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it wants to run {module}.{name}; only plain values are read")


# ---------------------------------------------------------------------------------------------------------------------
# which sequences


def random_bits(seed: int, stream: int, step: int, n: int) -> np.ndarray:
    """
    n random 64-bit numbers that depend on the arguments alone: Philox (Salmon et al. 2011), with the step as the high
    word of its counter. The raw bits are taken, since numpy promises those, not its ways of using them, to stay.
    """
    return np.random.Philox(key=[seed, stream], counter=[0, 0, 0, step]).random_raw(n)


def random_windows(n_tokens: int, block_size: int, seed: int, stream: int, step: int, n: int) -> np.ndarray:
    """Starts (n,) of windows anywhere in the text, with replacement, as nanoGPT draws them."""
    return (random_bits(seed, stream, step, n) % np.uint64(n_tokens - block_size)).astype(np.int64)


def shuffled_windows(n_tokens: int, block_size: int, seed: int, step: int, n: int) -> np.ndarray:
    """Starts (n,) of the step's windows where every window of the text is read once an epoch, in a new order each."""
    windows = (n_tokens - 1) // block_size
    epochs, places = np.divmod(step * n + np.arange(n), windows)
    order = np.concatenate([epoch_order(windows, seed, int(e))[places[epochs == e]] for e in np.unique(epochs)])
    return order * block_size


@lru_cache(maxsize=2)
def epoch_order(windows: int, seed: int, epoch: int) -> np.ndarray:
    """A permutation of the windows; 8 bytes a window are held (70 MB for OpenWebText at block_size 1024)."""
    return np.argsort(random_bits(seed, SHUFFLE, epoch, windows), kind="stable")


# ---------------------------------------------------------------------------------------------------------------------
# whose they are


@dataclass(frozen=True)
class Share:
    """How a batch of `sequences` is spread: every rank runs `micro_steps` micro-batches of `rows` rows."""

    sequences: int
    rank: int
    world_size: int
    micro_steps: int
    rows: int

    def pick(self, starts: np.ndarray, micro_step: int) -> np.ndarray:
        """This rank's rows (rows,) of one micro-step, from the starts of the whole batch; MISSING past its end."""
        first = (micro_step * self.world_size + self.rank) * self.rows
        mine = starts[first : first + self.rows]
        return np.pad(mine, (0, self.rows - len(mine)), constant_values=MISSING)


def share_of(sequences: int, rank: int, world_size: int, batch_size: int) -> Share:
    """
    The even share of one rank: the same number of micro-steps and rows for all, as few micro-steps as batch_size
    allows and then as few rows: 48 sequences on 7 ranks at batch_size 12 are one micro-step of 7 rows (one missing).
    """
    most = -(-sequences // world_size)
    micro_steps = -(-most // batch_size)
    return Share(sequences, rank, world_size, micro_steps, rows=-(-most // micro_steps))


# ---------------------------------------------------------------------------------------------------------------------
# reading


def read_rows(tokens: np.ndarray, starts: np.ndarray, block_size: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets, each (rows, block_size) int64 on the CPU; a missing row is zeros with targets of -1."""
    missing = starts == MISSING
    if missing.all():
        windows = np.zeros((len(starts), block_size + 1), np.int64)
    else:
        windows = tokens[np.where(missing, 0, starts)[:, None] + np.arange(block_size + 1)].astype(np.int64)
    x, y = windows[:, :-1].copy(), windows[:, 1:].copy()
    x[missing], y[missing] = 0, -1
    return torch.from_numpy(x), torch.from_numpy(y)


def micro_batches(
    tokens: np.ndarray,
    starts_of: Callable[[int], np.ndarray],
    steps: Iterable[int],
    share: Share,
    block_size: int,
    vocab_size: int,
    device: torch.device,
) -> Iterator[tuple[Tensor, Tensor]]:
    """
    The micro-batches (x, y), each (rows, block_size) on `device`, of the given steps in turn. A thread reads two
    ahead, so that a slow disk delays nothing, and the next one is on its way to the device before this one is used.

    Args:
        starts_of: the starts of a step's windows, for the whole batch.

    Raises:
        ValueError: what is read holds an id beyond the vocabulary.
    """
    pin = device.type == "cuda"  # only pinned memory is copied without the CPU waiting
    path = Path(getattr(tokens, "filename", None) or "the data")

    def read(step: int, micro_step: int) -> tuple[Tensor, Tensor]:
        x, y = read_rows(tokens, share.pick(starts_of(step), micro_step), block_size)
        check_ids(max(int(x.max()), int(y.max())), vocab_size, path)
        return (x.pin_memory(), y.pin_memory()) if pin else (x, y)

    starts_of = lru_cache(maxsize=1)(starts_of)  # one draw for all micro-steps of a step
    jobs = ((step, micro_step) for step in steps for micro_step in range(share.micro_steps))
    copied = ((x.to(device, non_blocking=True), y.to(device, non_blocking=True)) for x, y in in_thread(read, jobs))
    current = next(copied, None)
    for following in copied:
        yield current
        current = following
    if current:
        yield current


def nothing(rows: int, block_size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """A micro-batch of missing rows."""
    return tuple(t.to(device) for t in read_rows(np.empty(0), np.full(rows, MISSING), block_size))


def in_thread(work: Callable, jobs: Iterable[tuple], ahead: int = 2) -> Iterator:
    """work(*job) of each job in order, done by one thread, `ahead` of the one who asks."""
    with ThreadPoolExecutor(1, thread_name_prefix="loader") as thread:
        waiting = deque()
        for job in jobs:
            waiting.append(thread.submit(work, *job))
            if len(waiting) > ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
