"""
Windows that begin with a document, see docs/data.md.

documents.bin contains the positions in train at which documents begin, as int64. prepare.py or
data/find_documents.py writes it.
"""

import hashlib
from pathlib import Path

import numpy as np

from isogpt.common.files import path_of_script
from isogpt.data.token_array import Tokens
from isogpt.data.token_files import TokenFile
from isogpt.data.windows import EvenWindows, Windows

FILE = "documents.bin"
# documents, in each of which the first window begins with the first document. A change cuts the windows of
# resumed runs anew. Smaller ones are computed faster when they are needed, but begin more windows that repeat
# a part of the one before
SECTION = 256
AT_ONCE = 512  # sections of which windows are counted at once


class DocumentWindows:
    """
    Windows that begin with a document. The next window begins with the first document that begins at or after
    the end of this one's input, or with the document that this one cuts, if that begins within this window:
    its beginning is then read again. So the only tokens left out are those of a document beyond its first
    block_size, and the documents at the end whose window does not fit into the file.

    Sections of documents are independent of each other, so that only the number of windows in each of them is
    kept in memory: they are counted at the start, and computed again when they are read.

    Args:
        index: the positions at which documents begin.
        n_tokens: the number of tokens in which they begin.

    Raises:
        ValueError: the positions do not increase or are outside of the tokens, or no window fits.
    """

    def __init__(self, index: Tokens, n_tokens: int, block_size: int) -> None:
        self.index, self.n_tokens, self.block_size = index, n_tokens, block_size
        counts, covered, digest = [], 0, hashlib.sha256()
        sections = np.arange(-(-len(index) // SECTION))
        for part in np.split(sections, range(AT_ONCE, len(sections), AT_ONCE)):
            begins = self.begins_of(part)
            self.check(begins)
            is_first = self.begin_windows(begins)
            counts.append(is_first.sum(axis=1))
            covered += self.covered_by(begins, is_first)
            digest.update(begins[is_first])
        self.digest = digest.hexdigest()[:12]  # of where windows begin
        self.ends = np.cumsum(np.concatenate(counts))  # (sections,): the windows up to the end of each
        self.left_out = n_tokens - covered  # tokens that no window reads as input
        self.repeated = len(self) * block_size - covered  # tokens that are read twice
        if not len(self):
            problem = f"no document in {index.path} is followed by block_size {block_size} tokens"
            raise ValueError(f"{problem}: set a smaller --block_size=, or --data_order=shuffle")

    def __len__(self) -> int:
        """The number of windows."""
        return int(self.ends[-1])

    def starts(self, places: np.ndarray) -> np.ndarray:
        """Where the windows with these numbers begin. Raises DataError, see TokenFile.read."""
        sections = np.searchsorted(self.ends, places, side="right")
        to_read, rows = np.unique(sections, return_inverse=True)
        begins = self.begins_of(to_read)
        is_first = self.begin_windows(begins)
        ends = is_first.sum(axis=1).cumsum()  # of the windows in these sections
        return begins[is_first][places - self.ends[sections] + ends[rows]]

    def begins_of(self, sections: np.ndarray) -> np.ndarray:
        """
        Where the documents of sections begin, and the first one of the section after it: (sections, SECTION +
        1). n_tokens where there is none.
        """
        begins = np.full((len(sections), SECTION + 1), self.n_tokens)
        first = sections * SECTION
        is_whole = first + SECTION < len(self.index)
        begins[is_whole] = self.index.read(first[is_whole], SECTION + 1)
        for row in np.flatnonzero(~is_whole):  # the last section
            count = len(self.index) - int(first[row])
            begins[row, :count] = self.index.read(first[row : row + 1], count)[0]
        return begins

    def begin_windows(self, begins: np.ndarray) -> np.ndarray:
        """
        Whether a window begins with the documents that begin at `begins`, of increasing sections, see
        begins_of. The last column is False. All sections are followed at once, from window to window.
        """
        flat, number = begins.ravel(), np.arange(begins.size)  # number: of a document, in all sections
        end = flat + self.block_size
        last = np.repeat(np.arange(SECTION, begins.size, SECTION + 1), SECTION + 1)
        cut = np.searchsorted(flat, end, side="right") - 1  # the last one that begins by the window's end
        following = np.minimum(np.maximum(number + 1, cut), last)
        # where a section ends, and where no window fits, nothing follows
        following = np.where((end < self.n_tokens) & (number < last), following, number)
        is_first = np.zeros(begins.size, bool)
        current = number[:: SECTION + 1]
        while len(current := current[following[current] > current]):
            is_first[current] = True
            current = following[current]
        return is_first.reshape(begins.shape)

    def covered_by(self, begins: np.ndarray, is_first: np.ndarray) -> int:
        """The number of tokens that windows read as input: up to the next window, or all of the window."""
        ends = is_first.copy()
        after = begins[:, -1]  # where the first window of the next section begins, if it fits
        ends[:, -1] = after + self.block_size < self.n_tokens
        row_starts = begins[ends]
        distance = np.minimum(np.diff(row_starts, append=self.n_tokens), self.block_size)
        return int(distance[is_first[ends]].sum())

    def check(self, begins: np.ndarray) -> None:
        """Raise ValueError unless positions increase within the tokens, up to the padding at the end."""
        is_padding = begins[:, 1:] == self.n_tokens
        if begins.min() < 0 or begins.max() > self.n_tokens or not (is_padding | (np.diff(begins) > 0)).all():
            problem = f"do not increase, or are not within the {self.n_tokens:,} tokens of train"
            raise ValueError(f"the positions in {self.index.path} {problem}: {how_to_find(self.index.path)}")

    def about(self) -> str:
        """What a user should know."""
        left_out, repeated = (f"{n / self.n_tokens:.1%}" for n in (self.left_out, self.repeated))
        return (
            f"{len(self):,}, each of which begins with one of {len(self.index):,} documents; {left_out} of "
            f"the tokens are left out, since they are beyond a document's first {self.block_size:,}, and "
            f"{repeated} are read twice"
        )


def windows_of(folder: Path, train: Tokens, meta: dict, data_order: str, block_size: int) -> Windows:
    """
    Return the windows of a data set for train.py's setting data_order, of which every order but random reads
    each once per epoch. For documents, this reads all of documents.bin.

    Args:
        meta: the metadata of the data set in `folder`.

    Raises:
        ValueError: documents.bin is missing or does not belong to `train`, or no window fits.
    """
    if data_order != "documents":
        return EvenWindows(len(train), block_size)
    index = open_index(folder, train, meta)
    return DocumentWindows(index, len(train), block_size)


def open_index(folder: Path, train: Tokens, meta: dict) -> TokenFile:
    """Open documents.bin. Raises ValueError if it is missing or does not belong to the tokens of `train`."""
    path = folder / FILE
    if not path.exists():
        problem = f"data_order 'documents' needs {path}, which says where documents begin"
        raise ValueError(f"{problem}: {how_to_find(path)}, or set --data_order=shuffle")
    index, size = TokenFile(path, "int64"), path.stat().st_size
    recorded = meta.get("train_documents")
    if not size or size / index.dtype.itemsize != recorded:
        problem = f"{path} contains {size} bytes, not 8 for each of train_documents in meta.json, {recorded}"
        raise ValueError(f"{problem}: {how_to_find(path)}")
    if meta.get("searched_tokens", len(train)) != len(train):  # train.bin has become longer or shorter since
        problem = f"{path} was written for {meta['searched_tokens']} tokens, but train contains {len(train)}"
        raise ValueError(f"{problem}: {how_to_find(path)}")
    places = np.linspace(0, len(index) - 1, 1000).astype(np.int64)
    begins = index.read(np.unique(places), 1)[:, 0]
    begins = begins[(begins > 0) & (begins < len(train))]  # others are reported when all are read
    if len(begins) and len(ids := np.unique(train.read(begins, 1))) > 1:
        problem = f"{path} belongs to other tokens: in train, its documents begin with {len(ids)} different"
        raise ValueError(f"{problem} ids, not with one, the end-of-text token: {how_to_find(path)}")
    return index


def how_to_find(path: Path) -> str:
    """The command that writes documents.bin again."""
    return f"type: python {path_of_script('find_documents.py')} {path.parent}"
