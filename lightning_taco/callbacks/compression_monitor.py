"""`CompressionMonitor`: the relative reconstruction error of every site, in whatever logger the user has."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from lightning_taco.callbacks.logging import log_now
from lightning_taco.dtensor.errors import ErrorKey, SiteError
from lightning_taco.strategies.compression import Compression
from lightning_taco.strategies.trainer import TacoTPStrategy


class CompressionMonitor(Callback):
    """Logs, by site, how far decoded tensors lie from the exact ones, and the bytes saved.

    Tags: ``compression/relative_error/<direction>/<site>/<kind>``, ``compression/nonfinite/<direction>/<site>/<kind>``
    (NaN and Inf values, only where there are any; the error is infinite there), ``compression/ratio`` and
    ``compression/worst_relative_error``.

    Args:
        every_n_steps: measure and log every how many training batches, whatever ``Trainer(log_every_n_steps)`` is; it
            replaces the strategy's ``sample_every_n_steps``, so that nothing is measured twice.

    Raises:
        TypeError: at set-up, when the strategy is not `TacoTPStrategy`.
        ValueError: for `every_n_steps` below 1.
    """

    def __init__(self, every_n_steps: int = 50) -> None:
        if isinstance(every_n_steps, bool) or not isinstance(every_n_steps, int) or every_n_steps < 1:
            raise ValueError(f"every_n_steps={every_n_steps!r} is not a number of steps; use an integer from 1 up.")
        self.every_n_steps = every_n_steps
        self._num_logged_samples = 0

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Take over the strategy's sampling."""
        compression = _compression(trainer)
        compression.sample_every_n_steps = self.every_n_steps
        self._num_logged_samples = compression.num_samples

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log a sample that the step has taken; the same on all ranks."""
        compression = _compression(trainer)
        if compression.num_samples == self._num_logged_samples:
            return
        self._num_logged_samples = compression.num_samples
        log_now(trainer, scalars(compression))


def scalars(compression: Compression) -> dict[str, float]:
    """The last sample as tag to number."""
    values = {"compression/ratio": compression.compression_ratio}
    if compression.relative_l2_error is not None:
        values["compression/worst_relative_error"] = compression.relative_l2_error
    for key, error in compression.errors.items():
        values.update(_site_scalars(key, error))
    return values


def _site_scalars(key: ErrorKey, error: SiteError) -> dict[str, float]:
    name = f"{key.direction}/{key.site or 'root'}/{key.kind}"
    values = {f"compression/relative_error/{name}": error.relative_l2_error}
    if error.num_nonfinite:
        values[f"compression/nonfinite/{name}"] = float(error.num_nonfinite)
    return values


def _compression(trainer: pl.Trainer) -> Compression:
    strategy = trainer.strategy
    if not isinstance(strategy, TacoTPStrategy):
        raise TypeError(
            f"CompressionMonitor watches what TacoTPStrategy compresses, but the Trainer's strategy is a "
            f"{type(strategy).__name__}; use Trainer(strategy=TacoTPStrategy()), or leave the callback out."
        )
    return strategy.compression
