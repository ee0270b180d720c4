"""What a callback works with, whether a Trainer or a Fabric script runs the loop: strategy, loggers, step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import lightning.pytorch as pl
from lightning.fabric import Fabric
from lightning.fabric.utilities.rank_zero import rank_zero_info

from lightning_taco.callbacks.events import Event, EventLogger
from lightning_taco.callbacks.logging import log_histogram, log_now
from lightning_taco.dtensor.histograms import Histogram
from lightning_taco.strategies import fabric as fabric_strategy
from lightning_taco.strategies import trainer as trainer_strategy
from lightning_taco.strategies.compression import Compression
from lightning_taco.strategies.pipeline import Pipeline

Strategy = trainer_strategy.TacoTPStrategy | fabric_strategy.TacoTPStrategy


@dataclass(frozen=True)
class Host:
    """The loop that a callback is part of.

    Attributes:
        loop: the Trainer or the Fabric.
        strategy: its `TacoTPStrategy`.
    """

    loop: pl.Trainer | Fabric
    strategy: Strategy

    @property
    def compression(self) -> Compression:
        """What the strategy compresses."""
        return self.strategy.compression

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Send `values` to every logger under `step`, at once; all ranks call it."""
        if isinstance(self.loop, pl.Trainer):
            log_now(self.loop, values, step)
        else:
            self.loop.log_dict(dict(values), step=step)

    def log_histogram(self, name: str, histogram: Histogram, step: int) -> None:
        """Send `histogram` to the loggers that are TensorBoard's; all ranks call it."""
        log_histogram(self.loop.loggers, name, histogram, step)

    def event(self, event: Event) -> None:
        """Tell the user, in one line, and every logger that keeps events; all ranks call it."""
        rank_zero_info(str(event))
        for logger in self.loop.loggers:
            if isinstance(logger, EventLogger):
                logger.log_event(event)


def host_of(loop: pl.Trainer | Fabric, callback: str) -> Host:
    """The host for the callback called `callback`.

    Raises:
        TypeError: when the loop's strategy is not `TacoTPStrategy`.
    """
    strategy = loop.strategy
    if not isinstance(strategy, (trainer_strategy.TacoTPStrategy, fabric_strategy.TacoTPStrategy)):
        owner = "Trainer" if isinstance(loop, pl.Trainer) else "Fabric"
        raise TypeError(
            f"{callback} watches what TacoTPStrategy compresses, but the {owner}'s strategy is a "
            f"{type(strategy).__name__}; use {owner}(strategy=TacoTPStrategy(...)), or leave the callback out."
        )
    return Host(loop, strategy)


def pipeline_of(loop: pl.Trainer | Fabric | None) -> Pipeline | None:
    """The pipeline of the loop's strategy; ``None`` without one, and for a strategy that knows none."""
    pipeline = getattr(getattr(loop, "strategy", None), "pipeline", None)
    return pipeline if isinstance(pipeline, Pipeline) and pipeline.is_on else None
