"""Runs of a `TinyModule` whose exchanges go wrong at given steps, and what callbacks did about it."""

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers.logger import DummyLogger, Logger
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_taco import TacoTPStrategy
from lightning_taco.callbacks.events import Event
from lightning_taco.config import CompressionConfig
from tests.lightning_models import TinyModule, make_trainer, tiny_dataloader

COMPRESSION = CompressionConfig(min_bytes=0)
DOWN = "forward/model.mlp.down/all_reduce"
UP = "backward/model.mlp.up/all_reduce"
CANCELLING = 1000.0


class EventRecorder(DummyLogger):
    """A logger that keeps events, and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []

    def log_event(self, event: Event) -> None:
        self.events.append(event)

    @property
    def changes(self) -> list[tuple[int, str, str]]:
        """Step, action and site of each event."""
        return [(event.step, event.action, event.site) for event in self.events]


class OutcomeRecorder(L.Callback):
    """Keeps how each step's exchanges went on this rank: ``outcomes[step][site]``, a site as in tags."""

    def __init__(self) -> None:
        self.outcomes: dict[int, dict[str, set[str]]] = {}

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        trainer.strategy.session.traffic.clear()  # type: ignore[attr-defined]

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        found: dict[str, set[str]] = {}
        for key in trainer.strategy.session.traffic.counts:  # type: ignore[attr-defined]
            found.setdefault(f"{key.direction}/{key.site}/{key.kind}", set()).add(key.outcome)
        self.outcomes[trainer.global_step - 1] = found

    def uncompressed_at(self, site: str) -> list[int]:
        """The steps in which `site` was sent as it is."""
        return [step for step, found in self.outcomes.items() if found[site] != {"compressed"}]


class FaultyModule(TinyModule):
    """A model in which an exchange, or the loss, goes wrong in some steps; gradients with NaN are left out.

    Args:
        rank: of this process.
        cancel_at: steps in which the two ranks' partial sums at `DOWN` are huge and cancel each other.
        nan_at: steps in which one value that `nan_rank` sends at `DOWN` is NaN.
        spike_at: steps whose loss is four times as large.
        nan_rank: the one rank that sends NaN.
    """

    def __init__(
        self,
        rank: int,
        *,
        cancel_at: Collection[int] = (),
        nan_at: Collection[int] = (),
        spike_at: Collection[int] = (),
        nan_rank: int = 1,
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        self.rank, self.nan_rank = rank, nan_rank
        self.cancel_at, self.nan_at, self.spike_at = cancel_at, nan_at, spike_at

    def configure_model(self) -> None:
        is_new = self.model is None
        super().configure_model()
        if is_new:
            assert self.model is not None
            # Before the hook of the parallel style, which adds the partial sums up.
            self.model.mlp.down.register_forward_hook(self._spoil, prepend=True)

    def _spoil(self, module: Any, inputs: Any, output: DTensor) -> DTensor:
        step, partial = self.trainer.global_step, output.to_local()
        change = torch.zeros_like(partial)
        if step in self.cancel_at:
            change += CANCELLING * torch.linspace(1, 2, partial.shape[-1]) * (1 if self.rank % 2 else -1)
        if step in self.nan_at and self.rank == self.nan_rank:
            change[0, 0, 0] = torch.nan
        return DTensor.from_local(partial + change, output.device_mesh, output.placements, run_check=False)

    def training_step(self, batch: Tensor, batch_index: int) -> Tensor:
        loss = super().training_step(batch, batch_index)
        return 4 * loss if self.trainer.global_step in self.spike_at else loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        gradients = [each.grad for each in self.parameters() if each.grad is not None]
        local = [each.to_local() if isinstance(each, DTensor) else each for each in gradients]
        if not all(each.isfinite().all() for each in local):
            for each in local:
                each.zero_()


def fit(
    module: L.LightningModule,
    callbacks: list[L.Callback],
    *,
    max_steps: int,
    compression: CompressionConfig | str | None = COMPRESSION,
    folder: Path | None = None,
    save_every: int = 1,
    resume_from: Path | None = None,
    num_samples: int = 16,
    make_strategy: Callable[..., TacoTPStrategy] = TacoTPStrategy,
    loggers: Sequence[Logger] = (),
    **settings: Any,
) -> tuple[EventRecorder, OutcomeRecorder]:
    """Train up to `max_steps`, of four samples each, and keep a checkpoint ``step=N.ckpt`` after each N-th step.

    Lightning resumes within an epoch with its first batch, so a run that is resumed anywhere has four samples in all.
    """
    events, outcomes = EventRecorder(), OutcomeRecorder()
    checkpoint = ModelCheckpoint(folder, "{step}", save_top_k=-1, every_n_train_steps=save_every)
    trainer = make_trainer(
        make_strategy(compression, save_distributed_checkpoint=False, sample_every_n_steps=0),
        max_epochs=-1,
        max_steps=max_steps,
        logger=[events, *loggers],
        callbacks=[*callbacks, *([outcomes] if compression is not None else []), *([checkpoint] if folder else [])],
        enable_checkpointing=folder is not None,
        **settings,
    )
    trainer.fit(module, tiny_dataloader(num_samples), ckpt_path=resume_from)
    return events, outcomes
