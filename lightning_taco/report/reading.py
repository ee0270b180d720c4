"""From the folder of a run to what is known of it; every way in which that can fail is a sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lightning_taco.callbacks import run_logger
from lightning_taco.report import csv_table
from lightning_taco.report.csv_table import CsvTable
from lightning_taco.report.json_lines import JsonLines
from lightning_taco.report.run_data import RunData

BREAK_EVEN = "break_even.json"
SETTINGS_FILES = ("config.yaml", "hparams.yaml")
MAX_SETTINGS_BYTES = 100_000
NUM_HINTS = 5


class ReportError(ValueError):
    """Why there is no page, in one sentence for the user."""


class RunReader:
    """Reads the logs of a run, and what is new in them whenever it is asked.

    Args:
        folder: of the run: with ``lightning_taco.jsonl``, or with CSVLogger's ``metrics.csv``.

    Attributes:
        folder: the same.

    Raises:
        ReportError: when it is no folder, holds no log, or cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if not folder.exists():
            raise ReportError(
                f"{folder} does not exist; give the folder of a run, such as logs/gpt_tiny_cpu/version_0."
            )
        if not folder.is_dir():
            raise ReportError(f"{folder} is not a folder; give the folder of a run, in which its log lies.")
        self._log = self._first_log()
        if self.data.is_empty and not self.data.info and self.data.num_unreadable:
            raise ReportError(
                f"{self._log.path} has no line that could be read; is it a log of {self._writer()}, and not another "
                "program's?"
            )

    @property
    def data(self) -> RunData:
        """What is known so far; not sorted yet."""
        return self._log.data

    @property
    def source(self) -> str:
        """The name of the log."""
        return self._log.path.name

    def update(self) -> bool:
        """Read what is new; whether there was anything.

        Raises:
            ReportError: when the log cannot be read any more.
        """
        return _read(self._log)

    def notes(self) -> list[str]:
        """What was odd in the log, one sentence each."""
        data, notes = self.data, []
        if self.source == csv_table.FILE_NAME:
            notes.append(
                f"Read from {csv_table.FILE_NAME}: without {run_logger.FILE_NAME} there are no events, no versions and "
                "no times."
            )
        if data.num_other_runs:
            notes.append(
                f"The log holds {data.num_other_runs} earlier run(s), whose steps begin again; the last one is shown."
            )
        if data.settings_changed:
            notes.append("The run was resumed with other settings; those of the last start are shown.")
        if data.num_unreadable:
            notes.append(f"{data.num_unreadable} line(s) of {self.source} could not be read and are left out.")
        if data.is_truncated:
            notes.append(f"The last line of {self.source} is half-written and left out.")
        return notes

    def settings_files(self) -> dict[str, str]:
        """Name to text of the files beside the log that say how the run was set up."""
        found = {}
        for name in SETTINGS_FILES:
            try:
                with (self.folder / name).open("rb") as file:
                    found[name] = file.read(MAX_SETTINGS_BYTES).decode("utf-8", errors="replace")
            except OSError:
                continue  # not there, or not for us: the page goes without
        return found

    def break_even(self) -> Any:
        """The content of ``break_even.json``; ``None`` without such a file, or when it is no JSON."""
        try:
            return json.loads((self.folder / BREAK_EVEN).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return None

    def _first_log(self) -> JsonLines | CsvTable:
        """The log of `RunLogger`; the table where there is none, or nothing in it."""
        logs: list[JsonLines | CsvTable] = []
        if (self.folder / run_logger.FILE_NAME).is_file():
            logs.append(JsonLines(self.folder / run_logger.FILE_NAME))
        if (self.folder / csv_table.FILE_NAME).is_file():
            logs.append(CsvTable(self.folder / csv_table.FILE_NAME))
        for log in logs:
            _read(log)
        if not logs:
            raise ReportError(self._no_logs())
        return next((log for log in logs if not log.data.is_empty), logs[0])

    def _no_logs(self) -> str:
        names = f"neither {run_logger.FILE_NAME} nor {csv_table.FILE_NAME}"
        found = sorted(
            path.parent.relative_to(self.folder).as_posix()
            for name in (run_logger.FILE_NAME, csv_table.FILE_NAME)
            for pattern in (f"*/{name}", f"*/*/{name}")
            for path in self.folder.glob(pattern)
        )
        hints = list(dict.fromkeys(found))
        if not hints:
            return (
                f"{self.folder} holds no log ({names}); give the folder of a run, or train with `lightning-taco fit` "
                "or with RunLogger among the loggers."
            )
        more = f", and {len(hints) - NUM_HINTS} more" if len(hints) > NUM_HINTS else ""
        return (
            f"{self.folder} holds no log itself ({names}), but folders in it do: {', '.join(hints[:NUM_HINTS])}{more}; "
            "give one of them."
        )

    def _writer(self) -> str:
        return "CSVLogger" if self.source == csv_table.FILE_NAME else "RunLogger"


def _read(log: JsonLines | CsvTable) -> bool:
    try:
        return log.update()
    except OSError as error:
        raise ReportError(f"{log.path} cannot be read ({error.strerror or error}).") from error
