"""Everything that the page shows of a run, as one JSON value: what is embedded in the page, and what a live page polls.

It holds no HTML. The page's script draws it, and writes every text as text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_taco.report.heat import heat_of
from lightning_taco.report.plots import BASELINE, Figure, event_figure, heat_figure, line_figure, lines_of
from lightning_taco.report.reading import RunReader
from lightning_taco.report.run_data import LoggedEvent
from lightning_taco.report.series import Line, Series, downsample, gap_in_percent, name_of
from lightning_taco.report.tables import Table, event_table, free_table, percent, site_table, time_text
from lightning_taco.report.tags import (
    COSINE,
    GRADIENT_NORMS,
    LAYER_NORM,
    RATIO,
    RELATIVE_ERROR,
    TIMES,
    SiteTag,
    in_model_order,
    is_evaluation,
    is_loss,
    site_tag,
)

MAX_LINES = 12
"""Lines in one plot; the others are among the numbers to choose from."""
MAX_CHOICES = 400
CHOICE_BUCKETS = 100
MAX_DEPTH = 10
"""Of settings in settings."""


class Report:
    """What the page shows of one run, and of a baseline beside it.

    Args:
        run: its reader.
        baseline: of a run that is compared with it, if there is one.
    """

    def __init__(self, run: RunReader, baseline: RunReader | None = None) -> None:
        self.run, self.baseline = run, baseline

    def content(self) -> dict[str, Any]:
        """The page's JSON value, of what was read so far. Cost: a few passes over all numbers."""
        data = self.run.data
        data.sort()
        if self.baseline is not None:
            self.baseline.data.sort()
        return {
            "title": _title(self.run.folder.resolve()),
            "subtitle": self._subtitle(),
            "notes": self._notes(),
            "cards": self._cards(),
            "figures": self._figures(),
            "tables": self._tables(),
            "choices": self._choices(),
            "settings": self._settings(),
            "files": self.run.settings_files(),
        }

    def _subtitle(self) -> str:
        data = self.run.data
        parts = [str(self.run.folder)]
        if data.first_time is not None:
            parts.append(f"from {time_text(data.first_time)} to {time_text(data.last_time)} UTC")
        if data.status:
            parts.append(f"ended: {data.status}")
        if self.baseline is not None:
            parts.append(f"baseline: {self.baseline.folder}")
        return " · ".join(parts)

    def _notes(self) -> list[str]:
        notes = self.run.notes()
        if self.run.data.is_empty:
            notes.append("Nothing was logged yet.")
        if self.baseline is not None:
            notes += [f"Baseline: {note}" for note in self.baseline.notes()]
            if not self._common_losses():
                notes.append("The run and the baseline have no loss of the same name, so there is no gap to show.")
        return notes

    def _losses(self) -> dict[str, Series]:
        """Training first; without the means over an epoch of what is there by step too."""
        series = self.run.data.series
        found = [tag for tag in series if is_loss(tag) and not _is_repeated(tag, series)]
        chosen = sorted(found, key=lambda tag: (is_evaluation(tag), tag))[:MAX_LINES]
        return {tag: series[tag] for tag in chosen}

    def _common_losses(self) -> dict[str, tuple[Series, Series]]:
        if self.baseline is None:
            return {}
        others = self.baseline.data.series
        return {tag: (series, others[tag]) for tag, series in self._losses().items() if tag in others}

    def _gaps(self) -> dict[str, Series]:
        gaps = {tag: gap_in_percent(series, other) for tag, (series, other) in self._common_losses().items()}
        return {tag: gap for tag, gap in gaps.items() if len(gap)}

    def _sites(self) -> dict[SiteTag, Series]:
        found = ((site_tag(tag), series) for tag, series in self.run.data.series.items())
        return {tag: series for tag, series in found if tag is not None}

    def _errors(self) -> dict[str, Series]:
        """Relative errors by place, forward first, in the order of the model."""
        errors = {tag.place: series for tag, series in self._sites().items() if tag.measure == RELATIVE_ERROR}
        order = in_model_order(errors)
        order.sort(key=lambda place: not place.startswith("forward"))
        return {place: errors[place] for place in order}

    def _cards(self) -> list[dict[str, str]]:
        data = self.run.data
        cards = []
        if data.last_step is not None:
            cards.append(_card("last step", f"{data.last_step:,.15g}", ""))
        for tag, series in list(self._losses().items())[:2]:
            cards.append(_card(tag, _short(series.last), f"at step {series.steps[-1]:,.15g}"))
        for tag, gap in list(self._gaps().items())[-1:]:
            text = f"{gap.last:+.2f}%" if math.isfinite(gap.last) else name_of(gap.last)
            cards.append(_card("gap to the baseline", text, f"{tag} at step {gap.steps[-1]:,.15g}"))
        ratio = data.series.get(RATIO)
        if ratio:
            cards.append(_card("compression", f"{_short(ratio.last)}x", "fewer bytes, all exchanges"))
        errors = self._errors()
        if errors:
            last_step = max(series.steps[-1] for series in errors.values())
            measured = [place for place, series in errors.items() if series.steps[-1] == last_step]
            worst = max(measured, key=lambda place: _rank(errors[place].last))
            cards.append(_card("worst site now", percent(errors[worst].last), " ".join(worst.split("/")[:-1])))
        num_events = sum(event.source != "run" for event in data.events)
        if num_events or errors:
            detail = f"last at step {data.events[-1].step:,.15g}" if num_events else "compression was not touched"
            cards.append(_card("events", str(num_events), detail))
        return cards

    def _figures(self) -> dict[str, Figure]:
        """Those for which there are numbers, by the name of their section."""
        data, events = self.run.data, self.run.data.events
        figures = {}
        losses = self._losses()
        if losses:
            figures["loss"] = self._loss_figure(losses, events)
        errors = self._errors()
        if errors:
            figures["error"] = heat_figure(heat_of(errors), events)
        gradients = self._gradient_figure(events)
        if gradients is not None:
            figures["gradients"] = gradients
        times = self._matching(lambda tag: tag.startswith(TIMES))
        if times:
            figures["time"] = line_figure([("time of a step, ms", lines_of(times))], events=events)
        panels = self._byte_panels()
        if panels:
            figures["bytes"] = line_figure(panels, events=events, height=240 * len(panels) + 60)
        if events:
            last = data.last_step
            first = min(series.steps[0] for series in data.series.values()) if data.series else events[0].step
            figures["events"] = event_figure(events, first, events[-1].step if last is None else last)
        return figures

    def _loss_figure(self, losses: Mapping[str, Series], events: Sequence[LoggedEvent]) -> Figure:
        series = dict(losses)
        series |= {f"{tag}{BASELINE}": other for tag, (_, other) in self._common_losses().items()}
        panels = [("loss", lines_of(series))]
        gaps = self._gaps()
        if gaps:
            panels.append(("gap in %", lines_of(gaps)))
        return line_figure(panels, events=events, height=520 if gaps else 380)

    def _gradient_figure(self, events: Sequence[LoggedEvent]) -> Figure | None:
        series = self.run.data.series
        norms = {tag: series[tag] for tag in GRADIENT_NORMS if tag in series}
        layers = self._matching(lambda tag: tag.startswith(LAYER_NORM))
        named = [
            ("norm of all", norms),
            ("norms by layer", layers),
            ("cosine", self._matching(lambda tag: tag == COSINE)),
        ]
        panels = [(title, lines_of(series)) for title, series in named if series]
        if not panels:
            return None
        is_logarithmic = bool(norms) and _spans_decades(norms.values())
        return line_figure(panels, events=events, height=180 + 180 * len(panels), logarithmic=is_logarithmic)

    def _byte_panels(self) -> list[tuple[str, dict[str, Line]]]:
        ratios, sizes = self._matching(lambda tag: tag == RATIO), self._matching(_is_size)
        return [(title, lines_of(series)) for title, series in (("ratio", ratios), ("bytes", sizes)) if series]

    def _matching(self, is_meant: Callable[[str], bool]) -> dict[str, Series]:
        """The first `MAX_LINES` series, in the order of the model, whose tags are meant."""
        series = self.run.data.series
        chosen = in_model_order(tag for tag in series if is_meant(tag))[:MAX_LINES]
        return {tag: series[tag] for tag in chosen}

    def _tables(self) -> dict[str, dict[str, Any]]:
        found: dict[str, Table | None] = {
            "sites": site_table(self._sites(), self.run.data.events) if self._sites() else None,
            "events": event_table(self.run.data.events) if self.run.data.events else None,
            "break_even": free_table(self.run.break_even()),
        }
        return {name: table._asdict() for name, table in found.items() if table is not None}

    def _choices(self) -> dict[str, Any]:
        """Every number that was logged, to choose from; figures of sites last, the worst ones first."""
        series = self.run.data.series
        sites = {tag for tag in series if site_tag(tag) is not None}
        plain = in_model_order(tag for tag in series if tag not in sites)
        chosen = [*plain, *sorted(sites, key=lambda tag: (not _is_error(tag), -_rank(series[tag].last), tag))]
        lines = ((tag, downsample(series[tag], CHOICE_BUCKETS)) for tag in chosen[:MAX_CHOICES])
        found = [{"tag": tag, "data": line_figure([("value", {tag: line})])["data"]} for tag, line in lines]
        layout = line_figure([("value", {})])["layout"]
        return {"layout": layout, "lines": found, "num_left_out": len(chosen) - len(found)}

    def _settings(self) -> list[tuple[str, list[tuple[str, str]]]]:
        """Titles, and names and values below each."""
        found = []
        for name in ("settings", "versions", "hyperparameters"):
            rows = flattened(self.run.data.info.get(name))
            if rows:
                found.append((name, rows))
        return found


def flattened(value: Any, prefix: str = "", depth: int = 0) -> list[tuple[str, str]]:
    """Nested settings as dotted names and texts.

    >>> flattened({"a": {"b": 1}, "c": [True, None]})
    [('a.b', '1'), ('c', 'true, none')]
    """
    if isinstance(value, dict) and value and depth < MAX_DEPTH:
        shown = [(name, each) for name, each in value.items() if not name.startswith("_")]  # Lightning's own notes
        named = ((f"{prefix}.{name}" if prefix else name, each) for name, each in shown)
        return [row for name, each in named for row in flattened(each, name, depth + 1)]
    if value is None and not prefix:
        return []
    return [(prefix, _words(value))] if prefix else []


def _words(value: Any, depth: int = 0) -> str:
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    if isinstance(value, list):
        return (", ".join(_words(each, depth + 1) for each in value) or "none") if depth < MAX_DEPTH else "…"
    if isinstance(value, dict):
        return "…" if value else "none"
    return str(value)


def _title(folder: Path) -> str:
    """The folder's name; where Lightning has numbered it, with the name above."""
    return "/".join(folder.parts[-2:]) if folder.name.startswith("version_") else folder.name or str(folder)


def _card(label: str, value: str, detail: str) -> dict[str, str]:
    return {"label": label, "value": value, "detail": detail}


def _short(value: float) -> str:
    return f"{value:.4g}" if math.isfinite(value) else name_of(value)


def _rank(value: float) -> float:
    """For sorting by size; NaN is the largest of all."""
    return math.inf if math.isnan(value) else value


def _spans_decades(series: Iterable[Series]) -> bool:
    """Whether finite values, all above zero, differ by more than a hundredfold."""
    finite = [value for each in series for value in each.values if math.isfinite(value)]
    return bool(finite) and min(finite) > 0 and max(finite) > 100 * min(finite)


def _is_size(tag: str) -> bool:
    return tag.startswith("compression/") and "bytes" in tag and site_tag(tag) is None


def _is_error(tag: str) -> bool:
    found = site_tag(tag)
    return found is not None and found.measure == RELATIVE_ERROR


def _is_repeated(tag: str, series: Mapping[str, Series]) -> bool:
    return tag.endswith("_epoch") and tag.removesuffix("_epoch") + "_step" in series
