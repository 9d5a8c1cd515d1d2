"""Read this rank's micro-batches of each training step and evaluation from the token files."""

from collections import deque
from collections.abc import Container, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import count

import numpy as np
import torch
from torch import Tensor

from isogpt.common.random_numbers import EVAL_TRAIN, EVAL_VAL, TRAIN, random_bits
from isogpt.data.dataset import MOST_IDS, Dataset, check_ids
from isogpt.data.mixture import drawn_sources, spread_sources
from isogpt.data.token_files import DataError, Tokens
from isogpt.data.windows import random_windows, shuffled_windows, starts_of_bits, whole_windows
from isogpt.parallel.mesh import Mesh
from isogpt.parallel.plan import Plan
from isogpt.parallel.shares import PADDING, Share, parse_shares, share_of, share_of_plan, share_of_whole

Batch = tuple[Tensor, Tensor]  # inputs and targets, each (rows, block_size / cp)
Batches = Iterator[Batch]


def read_rows(tokens: Tokens, starts: np.ndarray, block_size: int, vocab_size: int = MOST_IDS) -> Batch:
    """
    Return inputs and targets, each (rows, block_size) int64 on the CPU. A padding row consists of zeros with
    targets of -1, and so does the end of a row that reaches beyond the end of the file. Raises DataError, see
    Tokens.read, and if an id is not below vocab_size.
    """
    padding = starts == PADDING
    begins = np.where(padding, 0, starts)
    beyond = np.maximum(begins + block_size + 1 - len(tokens), 0)
    begins = begins - beyond
    windows = tokens.read(begins, block_size + 1).astype(np.int64)
    check_ids(windows, vocab_size, tokens, begins)
    x, y = windows[:, :-1].copy(), windows[:, 1:].copy()
    for row in np.flatnonzero(beyond):  # has been read to the end of the file, and moves to the left
        n = beyond[row]
        for values, padded in ((x, 0), (y, -1)):
            values[row] = np.append(values[row, n:], [padded] * n)
    x[padding], y[padding] = 0, -1
    return torch.from_numpy(x), torch.from_numpy(y)


@dataclass
class Reader:
    """Reads this rank's share of the training steps and of the evaluations."""

    data: Dataset
    order: str  # random, shuffle or documents
    seed: int
    plan: Plan
    mesh: Mesh
    device: torch.device
    # of the data ranks, whose shares are proportional to them; (): equal; None: as the plan's shares say
    speeds: tuple[float, ...] | None = None
    # how many more sequences the run has read before than the steps say, because its batch size was different
    shift: int = 0
    problems: list[DataError] = field(default_factory=list)  # why this rank could not read training data

    def __post_init__(self) -> None:
        if self.speeds is None:
            self.speeds = parse_shares(self.plan.shares)

    @property
    def block_size(self) -> int:
        """Tokens of a sequence."""
        return self.plan.model_args["block_size"]

    @property
    def share(self) -> Share:
        """This rank's share of a step."""
        return self.share_of_rank(self.mesh.rank)

    def share_of_rank(self, rank: int) -> Share:
        """A rank's share of a step."""
        return share_of_plan(self.plan, replace(self.mesh, rank=rank), self.speeds)

    def starts(self, step: int) -> np.ndarray:
        """The windows (sequences,) of a training step, for the global batch: positions in Dataset.train."""
        n = self.plan.sequences
        numbers = self.shift + step * n + np.arange(n)
        of_sources, numbers = drawn_sources(self.data.quotas, self.seed, numbers)
        if self.order == "random":
            return self.random_starts(of_sources, TRAIN, step)
        starts = np.empty(n, np.int64)
        for number, source in enumerate(self.data.sources):
            rows = of_sources == number
            starts[rows] = shuffled_windows(source.windows, self.seed, numbers[rows])
        return starts + self.data.begins[of_sources]

    def random_starts(self, of_sources: np.ndarray, stream: int, step: int) -> np.ndarray:
        """
        Starts (n,) of windows at any position of their sources, as positions in Dataset.train.

        Args:
            of_sources: the number (n,) of each window's source.
            stream: of random numbers, with the step as in random_bits.
        """
        bits = random_bits(self.seed, stream, step, len(of_sources))
        lengths = np.array([len(source.train) for source in self.data.sources])
        starts = starts_of_bits(bits, lengths[of_sources], self.block_size)
        return starts + self.data.begins[of_sources]

    def train(self, step: int, position: int, skipped: Container[int] = ()) -> Batches:
        """
        Yield this rank's micro-batches from `step` on, see `read`. Other ranks compute a step with this rank:
        they hear of `problems` at the end of the step.

        Args:
            position: the tokens that the run has read before.
            skipped: steps that are left out.
        """
        self.shift = position // self.block_size - step * self.plan.sequences
        steps = (self.starts(number) for number in count(step) if number not in skipped)
        return self.read(self.data.train, steps, self.share, self.problems)

    def eval_windows(self, split: str, sequences: int) -> np.ndarray:
        """The windows that an evaluation reads, over all ranks; see `evaluation`."""
        data, block_size = self.data, self.block_size
        if split == "train":
            n = sequences or len(whole_windows(len(data.val), block_size))
            of_sources = spread_sources(data.quotas, n)
            return self.random_starts(of_sources, EVAL_TRAIN, 0)
        n_tokens = len(data.splits[split])
        if not sequences:
            return whole_windows(n_tokens, block_size)
        return random_windows(n_tokens, block_size, self.seed, EVAL_VAL, 0, sequences)

    def eval_targets(self, split: str, sequences: int) -> int:
        """How many tokens an evaluation predicts, over all ranks."""
        last = len(self.data.splits[split]) - 1
        targets = last - self.eval_windows(split, sequences)
        return targets.clip(max=self.block_size).sum().item()

    def evaluation(self, split: str, sequences: int) -> Batches:
        """
        Yield this rank's micro-batches of an evaluation, which reads the same sequences every time.

        Args:
            split: one of Dataset.splits.
            sequences: at random positions. 0: all of a validation set, each token once, and of train as many
                random sequences as the whole of val has.

        Raises:
            DataError: after the last micro-batch, if the file was truncated or cannot be read, or an id is
                outside the vocabulary.
        """
        starts = self.eval_windows(split, sequences)
        mesh, plan = self.mesh, self.plan
        sizes = (len(starts), mesh.data_rank, mesh.data_size, plan.micro_batch)
        share = share_of_whole(*sizes) if plan.exact else share_of(*sizes, speeds=self.speeds)
        problems = []
        yield from self.read(self.data.splits[split], [starts], share, problems)
        if problems:
            raise problems[0]

    def read(self, tokens: Tokens, steps: Iterable[np.ndarray], share: Share, problems: list) -> Batches:
        """
        Yield the micro-batches (x, y), each (rows, block_size / cp) on the device, of `steps` in
        order. A thread reads two micro-batches ahead, so that a slow disk does not delay a step.

        Args:
            steps: the starts of each step's windows, for the global batch.
            problems: if a file was truncated or cannot be read, or an id is outside the vocabulary, it
                receives the error, and padding takes the place of the micro-batch, since ranks that compute a
                model together need the same number of them.
        """
        positions = self.mesh.positions(self.block_size)
        vocab_size = self.plan.model_args["vocab_size"]
        # an asynchronous copy needs memory that stays allocated, which MPS does not guarantee
        is_pinned = self.device.type == "cuda"

        def on_cpu() -> Batches:
            for starts in steps:
                for micro_step in range(share.micro_steps):
                    own = share.pick(starts, micro_step)
                    try:
                        x, y = read_rows(tokens, own, self.block_size, vocab_size)
                        if self.mesh.cp > 1:  # indexing starts threads, which slow a step on a CPU by a fifth
                            x, y = x[:, positions], y[:, positions]
                        if is_pinned:  # copies to a GPU from other memory block the CPU
                            x, y = x.pin_memory(), y.pin_memory()
                    except DataError as e:
                        problems.append(e)
                        x, y = self.padding_batch(len(own))
                    yield x, y

        for batch in in_thread(on_cpu()):
            yield tuple(part.to(self.device, non_blocking=is_pinned) for part in batch)

    def padding_batch(self, rows: int = 0) -> Batch:
        """Padding rows as inputs and targets, see `read_rows`: `rows`, or those of a training micro-batch."""
        shape = (rows or self.share.rows, self.block_size // self.mesh.cp)
        x = torch.zeros(shape, dtype=torch.int64, device=self.device)
        return x, torch.full_like(x, -1)


def in_thread(items: Iterator, ahead: int = 2) -> Iterator:
    """Yield the items of an iterator, which a thread computes up to `ahead` in advance."""
    with ThreadPoolExecutor(1, thread_name_prefix="loader") as thread:
        waiting = deque(thread.submit(next, items, None) for _ in range(ahead))
        while (item := waiting.popleft().result()) is not None:
            waiting.append(thread.submit(next, items, None))
            yield item
