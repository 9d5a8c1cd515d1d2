"""The curves of a run's losses, which keep as many points as a picture can show."""

import math
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from isogpt.common.files import as_record, regular_file

LIMIT = 1000  # points of a curve; loss.png is 880 pixels wide
# the beginning of the line of a step or an evaluation; parsing the line would take ten times as long
STEP = re.compile(rb'\{"iter": (\d{1,18}), (?!"statistics")')

Points = list[tuple[int, float]]  # (step, loss)


@dataclass
class Curve:
    """
    The first point in every `spacing` steps, and the last point. The spacing is doubled when there would be
    more than `limit` points. So a curve depends on which points were added, and not on when.
    isogpt/lab/runs.py keeps whole records in place of the losses.
    """

    points: Points = field(default_factory=list)
    last: Points = field(default_factory=list)  # [the last point]
    spacing: int = 1
    limit: int = LIMIT

    def has_room(self, step: int) -> bool:
        """Whether a point at this step is kept."""
        return not self.points or step // self.spacing > self.points[-1][0] // self.spacing

    def add(self, step: int, loss: float) -> None:
        """Add a point; steps increase."""
        self.last = [(step, loss)]
        if self.has_room(step):
            self.points.append((step, loss))
        while len(self.points) > self.limit:
            self.thin(2 * self.spacing)

    def thin(self, spacing: int) -> None:
        """Keep the first point in every `spacing` steps."""
        first = {}
        for step, loss in self.points:
            first.setdefault(step // spacing, (step, loss))
        self.points, self.spacing = list(first.values()), spacing

    def before(self, end: int) -> "Curve":
        """Return a copy with the points before step `end`."""
        points = [point for point in self.points if point[0] < end]
        last = [point for point in self.last if point[0] < end]
        return Curve(points, last or points[-1:], self.spacing, self.limit)

    def followed_by(self, later: "Curve") -> "Curve":
        """Return a curve with the points of this curve, then those of one that begins later."""
        both = self.before(math.inf)
        both.thin(max(self.spacing, later.spacing))
        for point in later.shown():
            both.add(*point)
        return both

    def shown(self) -> Points:
        """The points to draw, up to the last one."""
        return self.points if self.last == self.points[-1:] else self.points + self.last


@dataclass
class Curves:
    """
    The losses of logged steps, the means over all steps since the previous logged one, and the losses of
    evaluations.
    """

    loss: Curve = field(default_factory=Curve)
    loss_mean: Curve = field(default_factory=Curve)
    train_loss: Curve = field(default_factory=Curve)
    val_loss: Curve = field(default_factory=Curve)

    def by_name(self) -> Iterator[tuple[str, Curve]]:
        """The curves with their names in a record."""
        return iter(vars(self).items())

    def add(self, record: dict) -> None:
        """Add the losses of a step or an evaluation that are finite."""
        for name, curve in self.by_name():
            loss = record.get(name)
            if isinstance(loss, float) and math.isfinite(loss):
                curve.add(record["iter"], loss)

    def before(self, end: int) -> "Curves":
        """Return a copy with what precedes step `end`."""
        return Curves(*(curve.before(end) for _, curve in self.by_name()))

    def followed_by(self, later: "Curves") -> "Curves":
        """Return these curves and their continuation."""
        pairs = zip(self.by_name(), later.by_name(), strict=True)
        return Curves(*(curve.followed_by(rest) for (_, curve), (_, rest) in pairs))


def read_curves(path: Path, end: float = math.inf) -> Curves:
    """
    Read the curves of metrics.jsonl before step `end`; none if the file is missing. Only the lines of
    evaluations and of steps that are kept are parsed: a million lines take a second and no memory.
    """
    curves, last = Curves(), b""
    with suppress(FileNotFoundError), open(path, "rb", opener=regular_file) as file:
        for line in file:
            match = STEP.match(line)
            if not match or int(match[1]) >= end:
                continue
            is_kept = b'"val_loss"' in line or curves.loss.has_room(int(match[1]))
            last = b"" if is_kept else line
            if is_kept and (record := as_record(line)):
                curves.add(record)
    if record := as_record(last):
        curves.add(record)
    return curves
