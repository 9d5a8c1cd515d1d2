"""
Windows that begin with a document, see docs/data.md.

documents.bin contains the positions in train at which documents begin, as int64. prepare.py or
data/find_documents.py writes it.
"""

import hashlib
from pathlib import Path

import numpy as np

from isogpt.common.files import path_of_script
from isogpt.data.windows import Windows


class DocumentWindows(Windows):
    """
    Windows that begin with a document: with the first one that begins at or after each multiple of
    block_size, or with the last one. The tokens between the end of a window and the next one are left out,
    and where windows overlap, tokens are read twice.

    Args:
        documents: (documents,) the positions at which documents begin, increasing from 0.
        n_tokens: the number of tokens in which they begin.
    """

    def __init__(self, documents: np.ndarray, n_tokens: int, block_size: int) -> None:
        super().__init__(n_tokens, block_size)
        begins = documents[documents + block_size < n_tokens]
        blocks = np.arange(0, n_tokens - block_size, block_size)
        following = np.searchsorted(begins, blocks)
        following = following.clip(max=len(begins) - 1)
        # np.unique takes a hundred times longer, since it does not use that they are sorted
        is_first = np.diff(following, prepend=-1) > 0
        self.begins = begins[following[is_first]]  # (windows,)
        lengths = np.diff(self.begins, append=n_tokens)
        covered = lengths.clip(max=block_size).sum()
        read = len(self) * block_size
        # fractions of the tokens: those that no window reads as input, and those that are read twice
        self.unread = 1 - covered / n_tokens
        self.repeated = (read - covered) / n_tokens
        self.digest = hashlib.sha256(self.begins).hexdigest()[:12]

    def __len__(self) -> int:
        """The number of windows."""
        return len(self.begins)

    def starts(self, places: np.ndarray) -> np.ndarray:
        """Where the windows with these numbers begin."""
        return self.begins[places]

    def about(self) -> str:
        """What a user should know."""
        left_out = f"{self.unread:.1%} of the tokens are left out"
        return f"{len(self):,}; {left_out}, {self.repeated:.1%} read twice"


def windows_of(folder: Path, meta: dict, n_tokens: int, data_order: str, block_size: int) -> Windows:
    """
    Return the windows of a data set for train.py's setting data_order, of which every order but random reads
    each once per epoch. For documents, this reads all of documents.bin.

    Args:
        meta: the metadata in the folder.
        n_tokens: the number of tokens in train.

    Raises:
        ValueError: documents.bin is missing or does not belong to train.
    """
    if data_order != "documents":
        return Windows(n_tokens, block_size)
    path = folder / "documents.bin"
    documents = np.fromfile(path, np.int64) if path.exists() else ()
    # train may have become longer or shorter since the file was written
    recorded = meta.get("train_documents"), meta.get("searched_tokens", n_tokens)
    if recorded != (len(documents), n_tokens):
        script = path_of_script("find_documents.py")
        raise ValueError(f"{path} is missing or of another train.bin: type python {script} {folder}")
    return DocumentWindows(documents, n_tokens, block_size)
