"""How callbacks log: at once, with the step that was measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.loggers import TensorBoardLogger

from lightning_taco.callbacks.sampling import current_step
from lightning_taco.dtensor.histograms import Histogram


def log_now(trainer: pl.Trainer, values: Mapping[str, float], step: int | None = None) -> None:
    """Send `values` to every logger at `step`, by default the current one, and into ``trainer.callback_metrics``.

    ``LightningModule.log`` would send them with the next batch that ``Trainer(log_every_n_steps)`` names, so they would
    stand beside another step's loss, or be replaced before they are sent.
    """
    if step is None:
        step = current_step(trainer)
    for logger in trainer.loggers:
        logger.log_metrics(dict(values), step=step)
    trainer.callback_metrics.update({name: torch.tensor(value) for name, value in values.items()})


def log_histogram(loggers: Iterable[Any], name: str, histogram: Histogram, step: int) -> None:
    """Send `histogram` to those of `loggers` that are TensorBoard's, as tag `name`; other loggers have no common form.

    Sums in it are those of the middles of its bins.
    """
    filled = [place for place, count in enumerate(histogram.counts) if count]
    if not filled:
        return
    first, last = filled[0], filled[-1]
    edges, counts = histogram.edges, histogram.counts
    middles = [(low + high) / 2 for low, high in pairwise(edges)]
    for logger in loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.add_histogram_raw(  # on rank 0; elsewhere the experiment is a dummy
                name,
                min=edges[first],
                max=edges[last + 1],
                num=histogram.num_values,
                sum=sum(count * middle for count, middle in zip(counts, middles, strict=True)),
                sum_squares=sum(count * middle**2 for count, middle in zip(counts, middles, strict=True)),
                bucket_limits=list(edges[first + 1 : last + 2]),
                bucket_counts=list(counts[first : last + 1]),
                global_step=step,
            )
