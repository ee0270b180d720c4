"""The tables of the page. A cell is its text and what it is sorted by; the page writes both as text, never as HTML."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import Any, NamedTuple

from lightning_taco.report.run_data import LoggedEvent, finite
from lightning_taco.report.series import Series, name_of
from lightning_taco.report.tags import NONFINITE, RELATIVE_ERROR, SiteTag, natural_key

MAX_ROWS = 2000
MAX_COLUMNS = 40
MAX_CELL = 500
SHOWN = (RELATIVE_ERROR, NONFINITE, "decibels")
"""Measures that have columns of their own."""
NUMBERLESS = -1e308
"""Sorts below every number."""
INFINITE = 1e308


class Cell(NamedTuple):
    """One cell."""

    text: str
    key: float | str
    """A number, or the lower-case text."""


class Table(NamedTuple):
    """Columns as ``(name, is_number)``, rows of as many cells, and a sentence where rows were left out."""

    columns: list[tuple[str, bool]]
    rows: list[list[Cell]]
    note: str


def site_table(sites: Mapping[SiteTag, Series], events: Sequence[LoggedEvent]) -> Table:
    """All sites, the one with the largest last error first; every measure that was logged is a column.

    Args:
        sites: sorted series by tag.
        events: from which the state of a site is read.
    """
    places: dict[str, dict[str, Series]] = {}
    keys: dict[str, SiteTag] = {}
    for tag, series in sites.items():
        places.setdefault(tag.place, {})[tag.measure] = series
        keys.setdefault(tag.place, tag)
    measures = dict.fromkeys(tag.measure for tag in sites)
    more = [measure for measure in measures if measure not in SHOWN and not measure.startswith("message_")][
        :MAX_COLUMNS
    ]
    columns = [
        ("site", False),
        ("direction", False),
        ("exchange", False),
        ("state", False),
        ("last error", True),
        ("largest error", True),
        ("at step", True),
        ("largest, dB", True),
        ("NaN or Inf values", True),
        *((measure.replace("_", " "), True) for measure in more),
    ]
    rows = []
    for place, found in places.items():
        key = keys[place]
        error, odd = found.get(RELATIVE_ERROR, Series()), found.get(NONFINITE, Series())
        peak, step = _peak(error)
        num_odd = sum(value for value in odd.values if math.isfinite(value))
        cells = [text_cell(text) for text in (key.site, key.direction, key.kind, _state(place, events))]
        cells += [_percent_cell(error.last if len(error) else None), _percent_cell(peak)]
        cells += [number_cell(step, ",.15g"), _decibel_cell(peak), number_cell(num_odd, ",.0f")]
        cells += [number_cell(found[measure].last if measure in found else None) for measure in more]
        rows.append(cells)
    rows.sort(key=lambda row: (-_as_number(row[4].key), natural_key(row[0].text)))
    return _limited(columns, rows)


def event_table(events: Sequence[LoggedEvent]) -> Table:
    """All events, the last one first."""
    columns = [("step", True), ("time (UTC)", False), ("source", False), ("action", False), ("site", False)]
    rows = [
        [
            number_cell(event.step, ",.15g"),
            text_cell(time_text(event.time)),
            text_cell(event.source),
            text_cell(event.action),
            text_cell(event.site or "all sites"),
            text_cell(event.reason),
        ]
        for event in reversed(events)
    ]
    return _limited([*columns, ("reason", False)], rows)


def free_table(content: Any) -> Table | None:
    """Rows of any JSON: a list of objects or of lists, alone or as a value of an object; ``None`` without rows."""
    rows = _rows_of(content)
    if not rows:
        return None
    named = [row if isinstance(row, dict) else dict(_numbered(row)) for row in rows[: MAX_ROWS + 1]]
    names = list(dict.fromkeys(str(name) for row in named for name in row))[:MAX_COLUMNS]
    cells = [{str(name): value for name, value in row.items()} for row in named]
    is_number = {name: all(finite(row.get(name, 0)) is not None for row in cells) for name in names}
    table_rows = [
        [number_cell(finite(row.get(name)), ",.6g") if is_number[name] else _any_cell(row.get(name)) for name in names]
        for row in cells
    ]
    return _limited([(name, is_number[name]) for name in names], table_rows, len(rows))


def text_cell(text: str) -> Cell:
    """A text, sorted without regard to case."""
    text = text if len(text) <= MAX_CELL else text[: MAX_CELL - 1] + "…"
    return Cell(text, text.lower())


def number_cell(value: float | None, form: str = "") -> Cell:
    """A number in a format, by default whole or with four digits; ``None`` is an empty cell."""
    if value is None:
        return Cell("", NUMBERLESS)
    if not math.isfinite(value):
        return Cell(name_of(value), -INFINITE if value < 0 else INFINITE)
    usual = ",.0f" if value == int(value) and abs(value) < 1e15 else ".4g"
    return Cell(format(value, form or usual), value)


def percent(value: float) -> str:
    """A share in percent, with three digits.

    >>> percent(0.02571), percent(float("nan"))
    ('2.57%', 'NaN')
    """
    return f"{100 * value:.3g}%" if math.isfinite(value) else name_of(value)


def time_text(time: float | None) -> str:
    """A time in words, UTC; ``""`` for none, or one that no calendar has."""
    try:
        return "" if time is None else datetime.fromtimestamp(time, timezone.utc).strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):
        return ""


def _peak(series: Series) -> tuple[float | None, float | None]:
    """The largest value, NaN above all, and its step."""
    if not len(series):
        return None, None
    index = max(range(len(series)), key=lambda i: INFINITE if math.isnan(series.values[i]) else series.values[i])
    return series.values[index], series.steps[index]


def _percent_cell(value: float | None) -> Cell:
    cell = number_cell(value)
    return cell if value is None or not math.isfinite(value) else Cell(percent(value), cell.key)


def _decibel_cell(value: float | None) -> Cell:
    if value is None or not math.isfinite(value):
        return number_cell(value)
    return Cell("-Inf", -INFINITE) if value <= 0 else number_cell(20 * math.log10(value), ".1f")


def _state(place: str, events: Sequence[LoggedEvent]) -> str:
    """What the last event did that names this site or all of them."""
    for event in reversed(events):
        if event.source != "run" and event.site in ("", place):
            if event.action == "resume":
                return f"compressed again since step {event.step:,.15g}"
            word = "sent as it is" if event.action == "suspend" else event.action
            return f"{word} since step {event.step:,.15g}"
    return ""


def _limited(columns: list[tuple[str, bool]], rows: list[list[Cell]], num_rows: int | None = None) -> Table:
    num_rows = len(rows) if num_rows is None else num_rows
    note = f"{num_rows - MAX_ROWS:,} more rows are not shown." if num_rows > MAX_ROWS else ""
    return Table(columns, rows[:MAX_ROWS], note)


def _rows_of(content: Any) -> list[Any]:
    if isinstance(content, dict):
        lists = [value for value in content.values() if isinstance(value, list) and value]
        return lists[0] if lists else [content]
    return content if isinstance(content, list) else []


def _numbered(row: Any) -> list[tuple[str, Any]]:
    return [(str(index), value) for index, value in enumerate(row if isinstance(row, list) else [row], start=1)]


def _any_cell(value: Any) -> Cell:
    found = finite(value)
    if found is not None:
        return number_cell(found, ",.6g")
    try:
        return text_cell("" if value is None else value if isinstance(value, str) else json.dumps(value))
    except RecursionError:
        return text_cell("…")


def _as_number(key: float | str) -> float:
    return key if isinstance(key, float | int) else NUMBERLESS
