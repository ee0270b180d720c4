"""A callback that logs how long a training step takes."""

import time
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback


class StepTimer(Callback):
    """Logs `step_ms`: wall-clock milliseconds of a training step, a mean over `every_n_steps` steps.

    Args:
        every_n_steps: steps between two logged means; the device is waited for only then.
    """

    def __init__(self, every_n_steps: int = 10) -> None:
        self.every_n_steps = every_n_steps
        self._start: float | None = None

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, index: int) -> None:
        """Start a span at the first batch of each `every_n_steps`."""
        if index % self.every_n_steps == 0:
            self._start = _now(pl_module.device)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, index: int
    ) -> None:
        """End it with the last."""
        if self._start is not None and index % self.every_n_steps == self.every_n_steps - 1:
            pl_module.log("step_ms", (_now(pl_module.device) - self._start) * 1000 / self.every_n_steps)
            self._start = None


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
