"""`StudyCallback`: watches the last steps of a training and writes what each codec would have done to its messages."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_info, rank_zero_warn
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from lightning_taco.config import CompressionConfig
from lightning_taco.dtensor.errors import ErrorKey
from lightning_taco.dtensor.session import CompressionSession
from lightning_taco.strategies.compression import TENSOR_PARALLEL
from lightning_taco.strategies.trainer import TacoTPStrategy
from lightning_taco.study import frontier, tables
from lightning_taco.study.candidates import Candidate, CodecCandidate, candidates_of
from lightning_taco.study.provenance import about
from lightning_taco.study.recorder import MessageRecorder, SiteSums
from lightning_taco.study.results import StudyResult, study_result
from lightning_taco.study.settings import DEFAULT_SETTINGS, StudySettings
from lightning_taco.study.timing import encode_decode_us

SECONDS_BETWEEN_LINES = 5.0


class StudyCallback(Callback):
    """Measures many codecs on the tensor-parallel messages of the last optimizer steps, forward and backward.

    The training itself is not changed. At its end rank 0 prints a table and writes ``study.json``, ``study.md`` and,
    with plotly installed, ``frontier.html`` (and ``frontier.svg``, with kaleido).

    Args:
        settings: what to observe and compare.

    Attributes:
        result: what was found, on rank 0 and after the training; else ``None``.

    Raises:
        TypeError: at set-up, when the strategy is not `TacoTPStrategy`.
        ValueError: at set-up, when that compresses nothing, or there is one tensor-parallel rank only; at the start of
            training, when its end is not known.
        RuntimeError: after the training, when no message could be observed.

    Cost: nothing before the observed steps; those take some hundred times as long, as every message goes through every
    codec, and the memory of several copies of the largest message in fp32.
    """

    def __init__(self, settings: StudySettings = DEFAULT_SETTINGS) -> None:
        self.settings = settings
        self.result: StudyResult | None = None
        self._recorder: MessageRecorder | None = None
        self._candidates: tuple[Candidate, ...] = ()
        self._observed_steps: list[int] = []
        self._was_trained = False
        self._last_line_s = 0.0

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse what cannot be studied before the model is built."""
        if stage != "fit":
            return
        self._was_trained = False
        check_studiable(trainer)
        strategy: Any = trainer.strategy
        num_ranks = strategy.device_mesh[TENSOR_PARALLEL].size()
        if num_ranks == 1:
            raise ValueError(
                "A study looks at messages between tensor-parallel ranks, but tensor_parallel_size=1 sends none; use "
                "tensor_parallel_size=2 or more."
            )
        if not frontier.has_plotly():
            rank_zero_warn(frontier.INSTALL_SENTENCE)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Learn which steps are the last."""
        self._was_trained = True
        self._observed_steps.clear()
        self.result = None
        if _steps_left(trainer, batch_idx=0) == math.inf:
            raise ValueError(
                f"A study observes the last {self.settings.num_steps} steps, but this training has no end; set "
                "trainer.max_steps."
            )
        session = _session(trainer)
        self._candidates = candidates_of(self.settings, session.element)
        self._recorder = MessageRecorder(
            self._candidates, session.group, self.settings.max_messages, self._show_progress
        )
        rank_zero_info(
            f"lightning_taco study: {len(self._candidates)} codecs will be measured in the last steps, "
            f"{self.settings.num_steps} of them"
        )

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Observe the batch if it belongs to one of the last steps."""
        if _steps_left(trainer, batch_idx) > self.settings.num_steps:
            return
        assert self._recorder is not None
        step = trainer.global_step + 1
        if step not in self._observed_steps:
            self._observed_steps.append(step)
            rank_zero_info(f"lightning_taco study: observing step {step}")
        _session(trainer).observers.append(self._recorder)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Look away, so that validation is not observed."""
        self._look_away(trainer)

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Look away."""
        self._look_away(trainer)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Add up over ranks; then rank 0 times the codecs and writes everything."""
        assert self._recorder is not None
        session = _session(trainer)
        self._check_something_was_seen(trainer, session)
        sums = self._recorder.read()
        folder = self._folder(trainer)
        if trainer.is_global_zero:
            self.result = self._result(trainer, session, sums)
            self._write(self.result, folder)
        self._recorder = None

    @override
    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Say so if there was nothing left to train."""
        if not self._was_trained:
            raise RuntimeError(
                f"The study observed nothing, since nothing was trained: step {trainer.global_step} is reached already "
                f"({_limits(trainer)}); raise trainer.max_steps by {self.settings.num_steps} or more, and "
                "trainer.max_epochs if that is what ends it."
            )

    def _look_away(self, trainer: pl.Trainer) -> None:
        strategy = trainer.strategy
        session = strategy.session if isinstance(strategy, TacoTPStrategy) else None
        if session is not None and self._recorder in session.observers:
            session.observers.remove(self._recorder)  # type: ignore[arg-type]

    def _check_something_was_seen(self, trainer: pl.Trainer, session: CompressionSession) -> None:
        assert self._recorder is not None
        if self._recorder.num_messages:
            return
        if not self._observed_steps:
            raise RuntimeError(
                f"The study observed nothing, since the training ended early, after step {trainer.global_step} "
                f"({_limits(trainer)}); lower trainer.max_steps to where it ends, or leave out what stops it."
            )
        reason = session.nothing_compressed_reason() or "nothing was compressed in the last steps"
        raise RuntimeError(
            f"The study observed nothing: {reason}; see 'compression' of the strategy, such as min_bytes."
        )

    def _folder(self, trainer: pl.Trainer) -> Path:
        """Where to write; every rank asks, since the Trainer agrees on it between them."""
        log_dir = trainer.log_dir
        return Path(self.settings.folder or Path(log_dir or trainer.default_root_dir) / "study")

    def _result(self, trainer: pl.Trainer, session: CompressionSession, sums: list[SiteSums]) -> StudyResult:
        strategy = trainer.strategy
        assert isinstance(strategy, TacoTPStrategy)
        largest = max(sums, key=lambda each: torch.Size(each.shape).numel())
        times = self._times_us(largest, strategy.root_device)
        made = about(trainer, session, self.settings, strategy.root_device)
        made["first_step"], made["last_step"] = self._observed_steps[0], self._observed_steps[-1]
        dtype = str(largest.dtype).removeprefix("torch.")
        made["timed"] = f"one message of {torch.Size(largest.shape).numel()} {dtype} values"
        return study_result(sums, self._candidates, times, made, session.traffic.stock_reasons())

    def _times_us(self, largest: SiteSums, device: torch.device) -> dict[str, float]:
        generator = torch.Generator(device).manual_seed(0)
        values = torch.randn(1, torch.Size(largest.shape).numel(), device=device, generator=generator).to(largest.dtype)
        times = {}
        codecs = [candidate for candidate in self._candidates if isinstance(candidate, CodecCandidate)]
        for index, candidate in enumerate(codecs, start=1):
            times[candidate.name] = encode_decode_us(candidate.codec, values)
            self._show(f"timed {index} of {len(codecs)} codecs")
        return times

    def _write(self, result: StudyResult, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(result.as_json(), indent=1, allow_nan=False)
        (folder / "study.json").write_text(text + "\n", encoding="utf-8")
        (folder / "study.md").write_text(tables.markdown(result), encoding="utf-8")
        sentences = frontier.write_frontier(result, folder)
        tables.print_study(result)
        for sentence in sentences:
            rank_zero_info(f"lightning_taco study: {sentence}")
        rank_zero_info(f"lightning_taco study: written to {folder}")

    def _show_progress(self, key: ErrorKey, place: int) -> None:
        assert self._recorder is not None
        site = key.site or "(outside any module)"
        self._show(
            f"message {self._recorder.num_messages} ({site}, {key.direction} {key.kind}), "
            f"codec {place + 1} of {len(self._candidates)}"
        )

    def _show(self, text: str) -> None:
        """A line on rank 0, not more often than every few seconds."""
        now = time.monotonic()
        if now - self._last_line_s >= SECONDS_BETWEEN_LINES:
            self._last_line_s = now
            rank_zero_info(f"lightning_taco study: {text}")


def check_studiable(trainer: pl.Trainer) -> CompressionConfig:
    """The settings of a Trainer whose messages can be observed.

    Raises:
        TypeError: when its strategy is not `TacoTPStrategy`.
        ValueError: when that compresses nothing, or the training has no end.
    """
    strategy = trainer.strategy
    if not isinstance(strategy, TacoTPStrategy):
        raise TypeError(
            f"A study observes what TacoTPStrategy compresses, but the Trainer's strategy is a "
            f"{type(strategy).__name__}; use strategy=TacoTPStrategy()."
        )
    if strategy.pipeline.is_on:
        raise ValueError(
            "A study observes the exchanges of one tensor-parallel group, which under a pipeline has the layers of its "
            "stage only; study the model with pipeline_parallel_size=1."
        )
    config = strategy.compression.config
    if config is None or config.is_empty:
        raise ValueError(
            "A study observes compressed exchanges, but compression is off; use any recipe, such as "
            "compression='default': what is observed are the exact messages, before they are compressed."
        )
    if trainer.max_epochs == -1 and trainer.max_steps == -1:
        raise ValueError(
            "A study observes the last steps, but max_epochs=-1 and max_steps=-1 give this training no end; set "
            "trainer.max_steps."
        )
    return config


def _steps_left(trainer: pl.Trainer, batch_idx: int) -> float:
    """Optimizer steps that are still to come when batch `batch_idx` of the current epoch starts, its own included."""
    by_steps = math.inf if trainer.max_steps == -1 else trainer.max_steps - trainer.global_step
    if trainer.max_epochs in (None, -1) or trainer.num_training_batches == math.inf:
        return by_steps
    # The last step of an epoch may have fewer batches than the others.
    steps_an_epoch = math.ceil(trainer.num_training_batches / trainer.accumulate_grad_batches)
    epochs_left = trainer.max_epochs - trainer.current_epoch
    return min(by_steps, epochs_left * steps_an_epoch - batch_idx // trainer.accumulate_grad_batches)


def _limits(trainer: pl.Trainer) -> str:
    return f"max_steps={trainer.max_steps}, max_epochs={trainer.max_epochs}"


def _session(trainer: pl.Trainer) -> CompressionSession:
    strategy = trainer.strategy
    assert isinstance(strategy, TacoTPStrategy)
    assert strategy.session is not None
    return strategy.session
