"""`HostedCallback`: one callback for the Trainer, which calls its hooks, and for a Fabric script, which calls it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import lightning.pytorch as pl
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from typing_extensions import override

from lightning_taco.callbacks.host import host_of
from lightning_taco.callbacks.sampling import current_step


class HostedCallback(Callback, ABC):
    """A callback whose work is in `attach`, `start_step` and `end_step`; the Trainer's hooks call them."""

    @abstractmethod
    def attach(self, loop: pl.Trainer | Fabric) -> None:
        """Begin to work on what the strategy of `loop` compresses; once after set-up, on all ranks.

        Raises:
            TypeError: when that is not `TacoTPStrategy`.
        """

    def start_step(self, step: int) -> None:
        """Before the forward of `step`, as loggers count it; all ranks."""

    def end_step(self, step: int, loss: Tensor | None = None) -> None:
        """After the optimizer step; all ranks."""

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse another strategy before any work is done."""
        host_of(trainer, type(self).__name__)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """`attach`."""
        self.attach(trainer)

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """`start_step`, with the first batch of the step."""
        self.start_step(current_step(trainer))

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """`end_step`."""
        self.end_step(current_step(trainer))
