"""Numbers over steps, and how they are thinned out for a plot without losing what stands out."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

MAX_BUCKETS = 750
"""Parts that a long line is cut into; each keeps its smallest and its largest value."""
NUM_DIGITS = 6
"""Significant digits that a page keeps of a value."""


class Mark(NamedTuple):
    """A value that cannot be drawn."""

    step: float
    name: str
    """``"NaN"``, ``"Inf"`` or ``"-Inf"``."""


class Line(NamedTuple):
    """What is drawn of a series. Where a value is not finite `y` is ``None``, a gap, and `marks` says what it was."""

    x: list[float]
    y: list[float | None]
    marks: list[Mark]


@dataclass
class Series:
    """Values of one tag in the order of their steps.

    Attributes:
        steps: float64, not decreasing once `sort` was called.
        values: float64, as many; NaN and infinities included.
    """

    steps: array[float] = field(default_factory=lambda: array("d"))
    values: array[float] = field(default_factory=lambda: array("d"))

    def __len__(self) -> int:
        return len(self.steps)

    def add(self, step: float, value: float) -> None:
        """One more value. Steps may come out of order."""
        self.steps.append(step)
        self.values.append(value)

    def drop_from(self, step: float) -> None:
        """Forget what was logged at `step` and later."""
        if self.steps and max(self.steps) >= step:
            kept = [(s, v) for s, v in zip(self.steps, self.values, strict=True) if s < step]
            self.steps, self.values = array("d", [s for s, _ in kept]), array("d", [v for _, v in kept])

    def sort(self) -> None:
        """Put the values in the order of their steps, those of one step in the order in which they came."""
        if any(self.steps[i] < self.steps[i - 1] for i in range(1, len(self.steps))):
            order = sorted(range(len(self.steps)), key=self.steps.__getitem__)
            self.steps = array("d", [self.steps[i] for i in order])
            self.values = array("d", [self.values[i] for i in order])

    @property
    def last(self) -> float:
        """The value at the last step; NaN without any."""
        return self.values[-1] if self.values else math.nan

    def at(self, step: float) -> float | None:
        """The value at `step`, on a straight line between its neighbours; ``None`` outside, or beside NaN or Inf."""
        if not self.steps or not self.steps[0] <= step <= self.steps[-1]:
            return None
        right = bisect_left(self.steps, step)
        if self.steps[right] == step:
            value = self.values[right]
        else:
            left = right - 1
            share = (step - self.steps[left]) / (self.steps[right] - self.steps[left])
            value = self.values[left] + share * (self.values[right] - self.values[left])
        return value if math.isfinite(value) else None


def buckets(steps: Sequence[float], num_buckets: int) -> Iterator[range]:
    """Cut indices into at most `num_buckets` runs of steps of the same width; empty ones are left out.

    Args:
        steps: not decreasing.
        num_buckets: from 1 up.

    >>> [list(part) for part in buckets([0, 1, 2, 3, 90, 100], 2)]
    [[0, 1, 2, 3], [4, 5]]
    """
    if not steps:
        return
    first, width = steps[0], (steps[-1] - steps[0]) / num_buckets
    start = 0
    for number in range(1, num_buckets):
        end = bisect_left(steps, first + number * width, lo=start)
        if end > start:
            yield range(start, end)
        start = end
    if start < len(steps):
        yield range(start, len(steps))


def downsample(series: Series, max_buckets: int = MAX_BUCKETS) -> Line:
    """Thin a series out, and keep what stands out.

    Args:
        series: sorted.
        max_buckets: parts of equal width in steps.

    Returns:
        The whole series when it has at most two values a bucket. Else of each bucket the smallest and the largest
        finite value at their own steps, where its first NaN and its first infinity stood, and the first and the last
        value of all.

    Cost: one pass over the values.
    """
    if len(series) <= 2 * max_buckets:
        kept: list[int] = list(range(len(series)))
    else:
        kept = [0]
        for part in buckets(series.steps, max_buckets):
            kept += [index for index in _extremes(series.values, part) if index != kept[-1]]
        if kept[-1] != len(series) - 1:
            kept.append(len(series) - 1)
    return _line(series, kept)


def gap_in_percent(series: Series, baseline: Series) -> Series:
    """How far a series lies above another one, in percent of it, at the steps of the former.

    Steps that lie outside the baseline's, or beside a value of it that is not finite or 0, are left out.

    Args:
        series: sorted.
        baseline: sorted; between its steps it is taken to be straight.
    """
    gap = Series()
    for step, value in zip(series.steps, series.values, strict=True):
        other = baseline.at(step)
        if other:
            gap.add(step, 100 * (value - other) / abs(other))
    return gap


def name_of(value: float) -> str:
    """What a value that is not finite is called.

    >>> name_of(float("-inf"))
    '-Inf'
    """
    return "NaN" if math.isnan(value) else "Inf" if value > 0 else "-Inf"


def rounded(value: float) -> float:
    """With as many digits as a page needs; a whole number as an int, which is shorter as JSON.

    >>> rounded(0.123456789), rounded(12345678.0)
    (0.123457, 12345678)
    """
    if value == int(value) and abs(value) < 1 << 53:
        return int(value)
    return float(f"{value:.{NUM_DIGITS}g}")


def _extremes(values: array[float], part: range) -> list[int]:
    """Indices of the smallest and largest finite value, the first NaN and the first infinity, in order."""
    piece = values[part.start : part.stop]
    low, high = min(piece), max(piece)
    if math.isfinite(low) and math.isfinite(high) and math.isfinite(sum(piece)):
        return sorted({part.start + piece.index(low), part.start + piece.index(high)})
    found: dict[str, int] = {}
    for index, value in enumerate(piece, part.start):
        if not math.isfinite(value):
            found.setdefault(name_of(value), index)
        else:
            if "low" not in found or value < values[found["low"]]:
                found["low"] = index
            if "high" not in found or value > values[found["high"]]:
                found["high"] = index
    return sorted(set(found.values()))


def _line(series: Series, kept: Sequence[int]) -> Line:
    line = Line([], [], [])
    for index in kept:
        step, value = rounded(series.steps[index]), series.values[index]
        line.x.append(step)
        if math.isfinite(value):
            line.y.append(rounded(value))
        else:
            line.y.append(None)
            line.marks.append(Mark(step, name_of(value)))
    return line
