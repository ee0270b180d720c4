"""The lines that `RunLogger` writes, read as they grow; whatever else stands in the file is counted and skipped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lightning_taco.report.run_data import LoggedEvent, RunData, finite, number


class JsonLines:
    """Reads one file again and again, each time only what is new.

    Args:
        path: the file.

    Attributes:
        data: what was read so far.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.data = RunData()
        self._offset = 0

    def update(self) -> bool:
        """Read what was appended; whether there was anything. A file that became shorter is read from the start.

        Raises:
            OSError: when the file cannot be read.
        """
        size = self.path.stat().st_size
        if size < self._offset:
            self.data, self._offset = RunData(), 0
        if size == self._offset:
            return False
        before = self._offset
        with self.path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not self._take(line):
                    break
                self._offset += len(line)
        return self._offset > before

    def _take(self, line: bytes) -> bool:
        """Read a line; false for one that is still being written."""
        is_whole = line.endswith(b"\n")
        found = _object(line)
        self.data.is_truncated = not is_whole and found is None and bool(line.strip())
        if self.data.is_truncated:
            return False
        if line.strip() and (found is None or not read_line(found, self.data)):
            self.data.num_unreadable += 1
        return True


def read_line(line: dict[str, Any], data: RunData) -> bool:
    """Add a line to `data`; false when it is none of those that `RunLogger` writes."""
    kind = line.get("kind")
    if kind == "scalars":
        return _read_scalars(line, data)
    if kind == "event":
        return _read_event(line, data)
    if kind == "run":
        data.begin({name: line.get(name) for name in ("versions", "settings", "hyperparameters")})
    elif kind == "hyperparameters" and isinstance(line.get("values"), dict):
        data.add_hyperparameters(line["values"])
    elif kind == "end":
        data.status = str(line.get("status") or "ended")
    else:
        return False
    return True


def _read_scalars(line: dict[str, Any], data: RunData) -> bool:
    step, values = finite(line.get("step")), line.get("values")
    if step is None or not isinstance(values, dict):
        return False
    found = {tag: number(value) for tag, value in values.items()}
    data.add_scalars(step, finite(line.get("time")), {tag: value for tag, value in found.items() if value is not None})
    return True


def _read_event(line: dict[str, Any], data: RunData) -> bool:
    step = finite(line.get("step"))
    if step is None:
        return False
    texts = [str(line.get(name) or "") for name in ("source", "action", "site", "reason")]
    data.add_event(LoggedEvent(step, finite(line.get("time")), *texts))
    return True


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(line.decode("utf-8", errors="replace"))
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
