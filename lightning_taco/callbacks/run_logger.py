"""`RunLogger`: everything that ``lightning-taco report`` shows, as lines of JSON in the run's folder.

Each line is one object with a ``kind``:

- ``run``: a run begins, or goes on after a resume; ``time``, ``versions``, ``settings``, ``hyperparameters``
- ``hyperparameters``: more of them, of a run that has begun already; ``time``, ``values``
- ``scalars``: one call of `log_metrics`; ``step``, ``time``, ``values`` (tag to number)
- ``event``: one `Event`; ``time`` and the event's own fields
- ``end``: the loop has ended; ``time``, ``status``

Times are seconds since 1970. JSON has no NaN and no infinity: they are the words ``"NaN"``, ``"Infinity"`` and
``"-Infinity"``.
"""

from __future__ import annotations

import json
import math
import os
import time
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.rank_zero import rank_zero_only, rank_zero_warn
from lightning.pytorch.loggers import Logger
from torch import nn
from typing_extensions import override

from lightning_taco.callbacks.events import Event
from lightning_taco.callbacks.versions import versions
from lightning_taco.collectives import break_even_file
from lightning_taco.config import CodecConfig, CompressionConfig
from lightning_taco.strategies.trainer import TacoTPStrategy

FILE_NAME = "lightning_taco.jsonl"


class RunLogger(Logger):
    """Keeps numbers, events and settings in ``lightning_taco.jsonl``, of which ``lightning-taco report`` makes a page.

    It goes beside other loggers, into ``Trainer(logger=[...])`` or ``Fabric(loggers=[...])``; `lightning-taco fit`
    adds it by itself. Each line is written when it is logged, so that a page that is served meanwhile shows it and a
    crash loses the last line at most. A file that is there already is appended to. Only rank 0 writes; when it cannot,
    it warns once and training goes on.

    Args:
        folder: where the file goes; made when the first line is written.

    Cost: one line of text and one opening of the file for each call; nothing waits for the device.

    Example:
        >>> import tempfile
        >>> logger = RunLogger(tempfile.mkdtemp())
        >>> logger.log_metrics({"train_loss": 2.5}, step=0)
        >>> [json.loads(line)["kind"] for line in logger.path.open()]
        ['run', 'scalars']
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        super().__init__()
        self._folder: Callable[[], str] = partial(str, os.fspath(folder))  # no lambda: loggers are pickled
        self._settings: dict[str, Any] = {}
        self._hyperparameters: dict[str, Any] = {}
        self._is_begun = False
        self._is_given_up = False
        self._next_step = 0

    @staticmethod
    def beside(logger: Logger, root: str) -> RunLogger:
        """One that writes into the folder of another logger, which is asked for it when the first line is written.

        Args:
            logger: its ``log_dir``, or else ``save_dir/name/version`` as Lightning does it for checkpoints.
            root: stands for the ``save_dir`` of a logger that has none.
        """
        run_logger = RunLogger(root)
        run_logger._folder = _FolderOf(logger, root)
        return run_logger

    @property
    def path(self) -> Path:
        """The file."""
        return Path(self._folder(), FILE_NAME)

    @property
    @override
    def name(self) -> str:
        """Of the folder."""
        return Path(self._folder()).name

    @property
    @override
    def version(self) -> str:
        """There is one: the folder."""
        return ""

    @property
    @override
    def save_dir(self) -> str:
        """The folder."""
        return self._folder()

    @property
    @override
    def log_dir(self) -> str:
        """The folder."""
        return self._folder()

    @override
    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Write numbers down; without a `step` it is the one after the last."""
        step = self._next_step if step is None else int(step)
        self._next_step = step + 1
        values = {str(tag): _number(value) for tag, value in metrics.items()}
        self._write({"kind": "scalars", "step": step, "time": _now(), "values": values})

    @rank_zero_only
    def log_event(self, event: Event) -> None:
        """Write down what a callback did."""
        self._write({"kind": "event", "time": _now(), **asdict(event)})

    @override
    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Keep hyperparameters for the line with which the run begins; later ones get a line of their own."""
        given = vars(params) if isinstance(params, Namespace) else dict(params)
        self._hyperparameters |= given
        if self._is_begun:
            self._write({"kind": "hyperparameters", "time": _now(), "values": _plain(given)})

    @override
    @rank_zero_only
    def log_graph(self, model: nn.Module, input_array: Any = None) -> None:
        """A Trainer calls it when a run begins, after `log_hyperparams`: write down that it does, and its settings."""
        trainer = getattr(model, "_trainer", None)
        if isinstance(trainer, pl.Trainer):
            self.log_settings(settings_of(trainer) | {"model": type(model).__name__})
            self._write()
            self._write_break_even(trainer)

    @rank_zero_only
    def log_settings(self, settings: Mapping[str, Any]) -> None:
        """Keep settings for the line with which the run begins; a Fabric script gives its own."""
        self._settings = dict(settings)
        self._is_begun = False

    @override
    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Write down that the loop has ended, and how."""
        if self._is_begun:
            self._write({"kind": "end", "time": _now(), "status": status})
            self._is_begun = False

    def _write(self, *lines: dict[str, Any]) -> None:
        """Append lines, after that with which the run begins if it has not."""
        if self._is_given_up:
            return
        if not self._is_begun:
            self._is_begun = True
            lines = (self._run_line(), *lines)
        text = "".join(json.dumps(each, ensure_ascii=False, allow_nan=False) + "\n" for each in lines)
        try:
            _append(self.path, text.encode("utf-8", errors="replace"))
        except OSError as error:
            self._is_given_up = True
            rank_zero_warn(
                f"{error.filename or self.path} cannot be written ({error.strerror or error}), so there is nothing for "
                "`lightning-taco report` to show; training goes on. Give RunLogger a folder that can be written."
            )

    def _write_break_even(self, trainer: pl.Trainer) -> None:
        """Beside the log: what ``min_bytes="auto"`` goes by in this run."""
        strategy = trainer.strategy
        if self._is_given_up or not isinstance(strategy, TacoTPStrategy) or strategy.compression.measured is None:
            return
        path = self.path.with_name(break_even_file.FILE_NAME)
        try:
            break_even_file.save(strategy.compression.measured, path)
        except OSError as error:
            rank_zero_warn(f"{path} cannot be written ({error.strerror or error}); the report goes without.")

    def _run_line(self) -> dict[str, Any]:
        return {
            "kind": "run",
            "time": _now(),
            "versions": versions(),
            "settings": _plain(self._settings),
            "hyperparameters": _plain(self._hyperparameters),
        }


def settings_of(trainer: pl.Trainer) -> dict[str, Any]:
    """What a reader of the report wants to know of a Trainer; JSON values."""
    settings: dict[str, Any] = {
        "strategy": type(trainer.strategy).__name__,
        "num_ranks": trainer.world_size,
        "precision": str(trainer.precision),
        "max_steps": trainer.max_steps,
    }
    if isinstance(trainer.strategy, TacoTPStrategy):
        settings["compression"] = compression_words(trainer.strategy.compression.config)
        pipeline = trainer.strategy.pipeline
        if pipeline.is_on:
            settings["pipeline"] = {
                "stages": pipeline.layout.num_stages,
                "schedule": pipeline.layout.schedule,
                "num_microbatches": pipeline.arguments.num_microbatches,
                "forward": str(pipeline.config.forward) if pipeline.config else "as it is",
                "backward": str(pipeline.config.backward) if pipeline.config else "as it is",
            }
    return settings


def compression_words(config: CompressionConfig | None) -> dict[str, Any] | str:
    """Settings of the compression in words; JSON values."""
    if config is None:
        return "off: tensors travel as they are"
    return {
        "forward": _codec_words(config.forward),
        "backward": _codec_words(config.backward),
        "min_bytes": config.min_bytes,
        "exclude": list(config.exclude),
        "recipes": dict(config.recipes),
        "during_validation": config.during_validation,
    }


def _codec_words(codec: CodecConfig | None) -> str:
    return "as it is" if codec is None else f"{codec}, {codec.bits_per_value:g} bits a value"


def _append(path: Path, text: bytes) -> None:
    """Add `text` to the file, on a line of its own even when a crash has left the last one unfinished."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                text = b"\n" + text
        file.write(text)


def _number(value: Any) -> float | str:
    number = float(value)
    if math.isfinite(number):
        return number
    return "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"


def _plain(value: Any) -> Any:
    """JSON values with the same content; what JSON does not know, in words."""
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(each) for each in value]
    if isinstance(value, float):
        return _number(value)
    return value if value is None or isinstance(value, (str, int, bool)) else str(value)


def _now() -> float:
    return round(time.time(), 3)


class _FolderOf:
    """The folder of a logger, found when it is first asked for."""

    def __init__(self, logger: Logger, root: str) -> None:
        self._logger, self._root = logger, root
        self._found: str | None = None

    def __call__(self) -> str:
        if self._found is None:
            self._found = self._logger.log_dir or self._resolved()
        return self._found

    def _resolved(self) -> str:
        version = self._logger.version
        version = version if isinstance(version, str) else f"version_{version}"
        return os.path.join(self._logger.save_dir or self._root, str(self._logger.name), version)
