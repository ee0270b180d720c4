"""Relative errors of all sites over all steps as one grid, each cell the largest of its steps."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from typing import NamedTuple

from lightning_taco.report.series import Series, name_of, rounded

MAX_COLUMNS = 240


class HeatMark(NamedTuple):
    """A cell in which a value was not finite."""

    column: int
    row: int
    name: str


class Heat(NamedTuple):
    """A grid ``[num_rows][num_columns]``; cells without a finite value are ``None``."""

    rows: list[str]
    columns: list[tuple[float, float]]
    """The first and the last step of each."""
    middles: list[float]
    """Where each is drawn: in the middle of its part of all steps. So they lie evenly, which is drawn in a third of the
    time: plotly colours pixels then, and not a rectangle for each cell."""
    cells: list[list[float | None]]
    marks: list[HeatMark]


def heat_of(series: Mapping[str, Series], max_columns: int = MAX_COLUMNS) -> Heat:
    """The grid of several series.

    Args:
        series: by name, in the order of the rows; sorted.
        max_columns: when there are more steps than this, columns are parts of equal width in steps.

    Cost: one pass over the values.
    """
    columns, middles = _columns(sorted({step for each in series.values() for step in each.steps}), max_columns)
    cells: list[list[float | None]] = []
    marks: list[HeatMark] = []
    starts = [first for first, _ in columns]
    for row, each in enumerate(series.values()):
        found, odd = _row(each, starts)
        cells.append([None if value is None else rounded(value) for value in found])
        marks += [HeatMark(column, row, name) for column, name in sorted(odd.items())]
    return Heat(list(series), columns, middles, cells, marks)


def _columns(steps: list[float], max_columns: int) -> tuple[list[tuple[float, float]], list[float]]:
    if len(steps) <= max_columns:
        kept = [rounded(step) for step in steps]
        return list(zip(kept, kept, strict=True)), kept
    width = (steps[-1] - steps[0]) / max_columns
    columns, middles, start = [], [], 0
    for number in range(1, max_columns + 1):
        end = len(steps) if number == max_columns else bisect_left(steps, steps[0] + number * width, lo=start)
        if end > start:
            columns.append((rounded(steps[start]), rounded(steps[end - 1])))
            middles.append(steps[0] + (number - 0.5) * width)
        start = end
    return columns, middles


def _row(series: Series, starts: list[float]) -> tuple[list[float | None], dict[int, str]]:
    cells: list[float | None] = [None] * len(starts)
    odd: dict[int, str] = {}
    column, num_columns = 0, len(starts)
    for step, value in zip(series.steps, series.values, strict=True):
        while column + 1 < num_columns and starts[column + 1] <= step:
            column += 1
        if not math.isfinite(value):
            odd.setdefault(column, name_of(value))
            continue
        known = cells[column]
        if known is None or value > known:
            cells[column] = value
    return cells, odd
