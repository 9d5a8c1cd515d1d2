"""Show how far a prepare.py has read: a bar on a terminal, a line a minute elsewhere."""

import sys
import time
from pathlib import Path
from typing import BinaryIO

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the repository

from isogpt.common.packages import needed_by

LINE_EVERY = 60.0  # seconds


class Place:
    """Where a reader is in its files, in bytes."""

    def __init__(self) -> None:
        self.total = self.before = 0  # of all files; of those that were read before
        self.file: BinaryIO | None = None  # the one that is being read

    def bytes_read(self) -> int:
        """The bytes read so far; of a Parquet file, only when it is read as a whole."""
        is_open = self.file is not None and not self.file.closed
        return self.before + (self.file.tell() if is_open else 0)


class Progress:
    """
    The progress since this object was made.

    Args:
        rows: the expected number of documents, if `place` has no files; None: unknown.
        documents, tokens: how many were written before.
    """

    def __init__(self, place: Place, rows: int | None, documents: int, tokens: int) -> None:
        with needed_by("the progress bar", "tqdm"):
            from tqdm import tqdm

        self.place, self.is_files, self.tokens = place, place.total > 0, tokens
        self.first = place.bytes_read() if self.is_files else documents
        self.total = place.total if self.is_files else rows
        self.began = self.shown = time.monotonic()
        unit = "B" if self.is_files else " documents"
        # disable=None: no bar if stderr is not a terminal
        self.bar = tqdm(total=self.total, initial=self.first, unit=unit, unit_scale=True, disable=None)

    def show(self, documents: int, tokens: int) -> None:
        """
        Show the number of documents and tokens: on the bar, or in a line if none was printed for a minute.
        """
        now = time.monotonic()
        speed = (tokens - self.tokens) / max(now - self.began, 1e-9)
        place = self.place.bytes_read() if self.is_files else documents
        line = f"{documents:,} documents, {tokens:,} tokens, {speed:,.0f} tokens/s"
        if not self.bar.disable:
            self.bar.set_postfix_str(line, refresh=False)
            self.bar.update(place - self.bar.n)
        elif now - self.shown >= LINE_EVERY:
            self.shown = now
            print(line + self.time_left(place, now), flush=True)

    def time_left(self, place: int, now: float) -> str:
        """The time that the rest takes at this speed; '' if it is not known."""
        if not self.total or place <= self.first:
            return ""
        minutes = (now - self.began) * (self.total - place) / (place - self.first) / 60
        return f", {max(0, minutes) // 60:.0f} h {max(0, minutes) % 60:.0f} min left"

    def close(self) -> None:
        """Leave the terminal to other output."""
        self.bar.close()
