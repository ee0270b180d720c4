"""``metrics.csv`` of Lightning's CSVLogger, for runs without the log of `RunLogger`."""

from __future__ import annotations

import csv
from pathlib import Path

from lightning_taco.report.run_data import RunData, finite

FILE_NAME = "metrics.csv"
NOT_NUMBERS = ("step", "epoch")


class CsvTable:
    """Reads one table again whenever it has changed; CSVLogger rewrites it when a column is added.

    Args:
        path: the table.

    Attributes:
        data: what was read last.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.data = RunData()
        self._seen: tuple[int, int] | None = None

    def update(self) -> bool:
        """Read the table if it has changed; whether it has.

        Raises:
            OSError: when it cannot be read.
        """
        found = self.path.stat()
        seen = (found.st_size, found.st_mtime_ns)
        if seen == self._seen:
            return False
        self._seen, self.data = seen, _read(self.path.read_bytes())
        return True


def _read(content: bytes) -> RunData:
    data = RunData()
    lines = content.decode("utf-8", errors="replace").replace("\0", "\ufffd").splitlines(keepends=True)
    if lines and not lines[-1].endswith(("\n", "\r")):
        data.is_truncated = True  # half a number is a number too, so the row cannot be trusted
        lines.pop()
    try:
        for row in csv.DictReader(lines):
            _read_row(row, data)
    except csv.Error:
        data.num_unreadable += 1
    return data


def _read_row(row: dict[str, str], data: RunData) -> None:
    step = finite(_number(row.get("step")))
    if step is None or None in row:  # more cells than columns
        data.num_unreadable += 1
        return
    values = {tag: _number(cell) for tag, cell in row.items() if tag not in NOT_NUMBERS}
    data.add_scalars(step, None, {tag: value for tag, value in values.items() if value is not None})


def _number(cell: str | None) -> float | None:
    try:
        return None if not cell else float(cell)
    except ValueError:
        return None
