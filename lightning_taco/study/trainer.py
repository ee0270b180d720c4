"""`StudyTrainer`: Lightning's Trainer with one method more, which is what the command line calls."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl

from lightning_taco.study.callback import StudyCallback, check_studiable
from lightning_taco.study.settings import DEFAULT_SETTINGS, StudySettings


class StudyTrainer(pl.Trainer):
    """A Trainer that can study which codec its model's tensor-parallel messages bear: by `study`."""

    def train_and_study(
        self,
        model: pl.LightningModule,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: pl.LightningDataModule | None = None,
        ckpt_path: str | None = None,
        weights_only: bool | None = None,
        study: StudySettings = DEFAULT_SETTINGS,
    ) -> None:
        """Train as fit does, and compare codecs on the last steps' own tensor-parallel messages.

        Args:
            model: to train.
            train_dataloaders: as for fit.
            val_dataloaders: as for fit.
            datamodule: as for fit.
            ckpt_path: checkpoint to go on from, as for fit; max_steps must lie beyond its step.
            weights_only: as for fit.
            study: what to observe and compare.

        Raises:
            TypeError: when the strategy is not `TacoTPStrategy`.
            ValueError: when it compresses nothing, or the training has no end.
            RuntimeError: when no message could be observed.
        """
        check_studiable(self)
        callback = StudyCallback(study)
        # Before the callbacks that save checkpoints, which Lightning keeps last.
        callbacks: list[Any] = self.callbacks  # type: ignore[attr-defined]
        callbacks.insert(0, callback)
        try:
            self.fit(model, train_dataloaders, val_dataloaders, datamodule, ckpt_path, weights_only)
        finally:
            callbacks.remove(callback)

    # jsonargparse names a group of options after a function's own name, which may not be that of an argument too.
    study = train_and_study
