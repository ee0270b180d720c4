"""A LightningModule around the model that pipelines cut; it says nothing of pipelines itself."""

from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_taco import TacoTPStrategy
from tests.lightning_models import make_trainer
from tests.pipeline_models import VOCABULARY, Chain


class ChainModule(L.LightningModule):
    """Trains a `Chain` to repeat its input.

    Args:
        num_blocks: of the chain.
        frozen: names of layers without gradients.
    """

    def __init__(self, num_blocks: int = 4, frozen: tuple[str, ...] = (), lr: float = 0.01, tied: bool = False) -> None:
        super().__init__()
        self.num_blocks, self.frozen, self.lr, self.tied = num_blocks, frozen, lr, tied
        self.model: Chain | None = None
        self.losses: list[float] = []
        self.logged: list[dict[str, float]] = []

    def configure_model(self) -> None:
        if self.model is None:
            self.model = Chain(self.num_blocks, tied=self.tied)
            for name in self.frozen:
                self.model.get_submodule(name).requires_grad_(False)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def test_step(self, batch: Tensor, batch_idx: int) -> dict[str, Tensor]:
        loss = self.loss(batch)
        self.log_dict({"test_loss": loss, "test_size": float(len(batch))}, batch_size=len(batch))
        return {"loss": loss}

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.model(batch).argmax(-1)

    def loss(self, batch: Tensor) -> Tensor:
        return F.cross_entropy(self.model(batch).flatten(0, 1).float(), batch.flatten())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(
            [each for each in self.parameters() if each.requires_grad], lr=self.lr, foreach=False
        )
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)}


def data(num_samples: int = 24, batch_size: int = 8, length: int = 6) -> DataLoader[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return DataLoader(torch.randint(0, VOCABULARY, (num_samples, length), generator=generator), batch_size=batch_size)


def pipelined(stages: int = 2, **arguments: Any) -> TacoTPStrategy:
    defaults = {"compression": None, "tensor_parallel_size": 1, "data_parallel_size": 1, "num_microbatches": 4}
    return TacoTPStrategy(pipeline_parallel_size=stages, **(defaults | arguments))


def one_process_trainer(**settings: Any) -> L.Trainer:
    return make_trainer("auto", **({"devices": 1} | settings))
