"""What is known of a run: numbers, events, resumes, settings, and what was odd in its logs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning_taco.report.series import Series

NONFINITE_WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


@dataclass(frozen=True)
class LoggedEvent:
    """One event of a log; texts are as they stood there, whatever they hold.

    Attributes:
        step: from which on it holds.
        time: seconds since 1970; ``None`` where the log has none.
        source: ``"guard"``, ``"schedule"``, or ``"run"`` for a resume.
        action: what was done.
        site: where; ``""`` for all sites.
        reason: why.
    """

    step: float
    time: float | None
    source: str
    action: str
    site: str
    reason: str


@dataclass
class RunData:
    """One run, filled line by line in the order of the log.

    A log can hold several starts. One whose steps go on where those before it had been is a resume: what the steps
    before it had beyond its first one is replaced. One whose steps begin again is another run: what was before it is
    forgotten, and `num_other_runs` counts it.

    Attributes:
        series: numbers by tag.
        events: in the order of the log, resumes included.
        info: of the last start: ``versions``, ``settings``, ``hyperparameters``.
        status: that the loop ended with; ``""`` while it runs, or after a crash.
        num_other_runs: earlier runs in the same log.
        num_unreadable: lines that are no lines of such a log.
        is_truncated: whether the last line is half-written.
        settings_changed: whether a resume came with other settings.
        first_time: of the log, seconds since 1970.
        last_time: the same.
    """

    series: dict[str, Series] = field(default_factory=dict)
    events: list[LoggedEvent] = field(default_factory=list)
    info: dict[str, Any] = field(default_factory=dict)
    status: str = ""
    num_other_runs: int = 0
    num_unreadable: int = 0
    is_truncated: bool = False
    settings_changed: bool = False
    first_time: float | None = None
    last_time: float | None = None
    _first_step: float | None = None
    _new_info: dict[str, Any] | None = None

    @property
    def is_empty(self) -> bool:
        """Whether it has neither numbers nor events."""
        return not self.series and not self.events

    @property
    def last_step(self) -> float | None:
        """The largest step of all."""
        steps = [series.steps[-1] for series in self.series.values() if series.steps]
        return max([*steps, *(event.step for event in self.events)], default=None)

    def begin(self, info: Mapping[str, Any]) -> None:
        """A start; whether it is a resume turns out with the first step."""
        self._new_info = dict(info)
        self.status = ""
        if self.is_empty:
            self.info = self._new_info

    def add_hyperparameters(self, values: Mapping[str, Any]) -> None:
        """More hyperparameters of the run."""
        info = self.info if self._new_info is None else self._new_info
        known = info.get("hyperparameters")
        info["hyperparameters"] = {**(known if isinstance(known, dict) else {}), **values}

    def add_scalars(self, step: float, time: float | None, values: Mapping[str, float]) -> None:
        """One logged set of numbers."""
        self._reach(step, time)
        for tag, value in values.items():
            series = self.series.get(tag)
            if series is None:
                series = self.series[tag] = Series()
            series.add(step, value)

    def add_event(self, event: LoggedEvent) -> None:
        """One event."""
        self._reach(event.step, event.time)
        self.events.append(event)

    def sort(self) -> None:
        """Put all numbers in the order of their steps."""
        for series in self.series.values():
            series.sort()

    def _reach(self, step: float, time: float | None) -> None:
        if self._new_info is not None:
            self._start(step, time)
        self._first_step = step if self._first_step is None else min(step, self._first_step)
        if time is not None:
            self.first_time = time if self.first_time is None else self.first_time
            self.last_time = time

    def _start(self, step: float, time: float | None) -> None:
        info, self._new_info = self._new_info or {}, None
        if self._first_step is not None and step > self._first_step:
            self._resume(step, time, info)
        elif self._first_step is not None:
            self.num_other_runs += 1
            self.series, self.events, self.settings_changed = {}, [], False
            self._first_step = self.first_time = self.last_time = None
        self.info = info

    def _resume(self, step: float, time: float | None, info: Mapping[str, Any]) -> None:
        for series in self.series.values():
            series.drop_from(step)
        self.series = {tag: series for tag, series in self.series.items() if len(series)}
        self.events = [event for event in self.events if event.step < step]
        changed = info.get("settings") != self.info.get("settings")
        self.settings_changed |= changed
        reason = "The run was resumed with other settings." if changed else "The run was resumed."
        self.events.append(LoggedEvent(step, time, "run", "resume", "", reason))


def number(value: Any) -> float | None:
    """A number of a log as a float, NaN and infinities included; ``None`` for what is none."""
    if isinstance(value, str):
        return NONFINITE_WORDS.get(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def finite(value: Any) -> float | None:
    """As `number`, but ``None`` for NaN and infinities."""
    found = number(value)
    return found if found is not None and math.isfinite(found) else None
