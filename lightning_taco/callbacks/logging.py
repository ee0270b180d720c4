"""How callbacks log: at once, with the step that was measured."""

from __future__ import annotations

from collections.abc import Mapping

import lightning.pytorch as pl
import torch


def log_now(trainer: pl.Trainer, values: Mapping[str, float], step: int | None = None) -> None:
    """Send `values` to every logger at `step`, by default the current one, and into ``trainer.callback_metrics``.

    ``LightningModule.log`` would send them with the next batch that ``Trainer(log_every_n_steps)`` names, so they would
    stand beside another step's loss, or be replaced before they are sent.
    """
    if step is None:
        step = trainer.fit_loop.epoch_loop._batches_that_stepped  # the step under which Lightning logs the batch's loss
    for logger in trainer.loggers:
        logger.log_metrics(dict(values), step=step)
    trainer.callback_metrics.update({name: torch.tensor(value) for name, value in values.items()})
