"""A LightningModule of a few thousand parameters, with what Lightning strategies can meet, and its data."""

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L
import pytest
import torch

# Lightning and DTensor import these at first use: once here, or 1.5 s in each forked rank of each test.
import torch._dynamo
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict
import torch.nn.functional as F
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

HIDDEN = 32
VOCABULARY = 48
LENGTH = 8


class TinyMlp(nn.Module):
    """Two linears; a `TinyLm`'s plan cuts the first by columns and the second by rows."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(HIDDEN, 4 * HIDDEN)
        self.down = nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(hidden)))


class TinyLm(nn.Module):
    """Embedding, a norm and an MLP beside a residual, a head: ``[B, S]`` tokens to ``[B, S, VOCABULARY]`` logits."""

    def __init__(self, *, tied: bool = False, checkpointing: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.norm = nn.LayerNorm(HIDDEN)
        self.mlp = TinyMlp()
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.checkpointing = checkpointing
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        normed = self.norm(hidden)
        branch = checkpoint(self.mlp, normed, use_reentrant=False) if self.checkpointing else self.mlp(normed)
        return self.head(hidden + branch)


def tiny_plan(*, sequence_parallel: bool = False, vocabulary_parallel: bool = False) -> dict[str, ParallelStyle]:
    """The tensor-parallel plan of a `TinyLm`; without options its norm, embedding and head stay plain tensors."""
    if sequence_parallel:
        return {
            "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "mlp": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
            "mlp.up": ColwiseParallel(),
            "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        }
    plan: dict[str, ParallelStyle] = {"mlp.up": ColwiseParallel(), "mlp.down": RowwiseParallel()}
    if vocabulary_parallel:
        plan["embedding"] = RowwiseParallel(input_layouts=Replicate())
        plan["head"] = ColwiseParallel(output_layouts=Replicate())
    return plan


class TinyModule(L.LightningModule):
    """Trains a `TinyLm` to repeat its input; it has the same first weights on every rank, at every world size.

    Args:
        sequence_parallel: a plan with sequence parallelism and a vocabulary-parallel embedding and head.
        vocabulary_parallel: an embedding and a head split by vocabulary, without sequence parallelism.
        tied: one weight for embedding and head.
        checkpointing: activation checkpointing around the MLP, by a call in the model's forward.
        checkpoint_wrapper: the same by torch's wrapper module.
        compile_backend: torch.compile the MLP with this backend once it is parallelised.
        fsdp: FSDP2 over the data-parallel axis, once it is parallelised.
        parallelize: apply the plan; without, every rank computes the whole model.
        lr: learning rate of AdamW.
        make_optimizer: another optimizer, from the parameters.

    Attributes:
        losses: what `training_step` has returned, as floats.
        validation_losses: the same of `validation_step`.
    """

    def __init__(
        self,
        *,
        sequence_parallel: bool = False,
        vocabulary_parallel: bool = False,
        tied: bool = False,
        checkpointing: bool = False,
        checkpoint_wrapper: bool = False,
        compile_backend: str | None = None,
        fsdp: bool = False,
        parallelize: bool = True,
        lr: float = 1e-2,
        make_optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
    ) -> None:
        super().__init__()
        self.model: TinyLm | None = None
        self.plan = tiny_plan(sequence_parallel=sequence_parallel, vocabulary_parallel=vocabulary_parallel or tied)
        self.tied, self.checkpointing, self.compile_backend, self.fsdp = tied, checkpointing, compile_backend, fsdp
        self.checkpoint_wrapper = checkpoint_wrapper
        self.parallelize, self.lr, self.make_optimizer = parallelize, lr, make_optimizer
        self.losses: list[float] = []
        self.validation_losses: list[float] = []

    def configure_model(self) -> None:
        """Build the model and parallelise it, once."""
        if self.model is not None:
            return
        torch.manual_seed(0)
        self.model = TinyLm(tied=self.tied, checkpointing=self.checkpointing)
        if self.parallelize:
            assert self.device_mesh is not None
            apply_tiny_plan(self.model, self.device_mesh, self.plan, fsdp=self.fsdp)
        if self.checkpoint_wrapper:
            self.model.mlp = checkpoint_wrapper(self.model.mlp)  # type: ignore[assignment]
        if self.compile_backend is not None:
            self.model.mlp = torch.compile(self.model.mlp, backend=self.compile_backend)  # type: ignore[assignment]

    def forward(self, tokens: Tensor) -> Tensor:
        """``[B, S]`` tokens to ``[B, S, VOCABULARY]`` logits."""
        assert self.model is not None
        return self.model(tokens)

    def training_step(self, batch: Tensor, batch_index: int) -> Tensor:
        """Cross entropy of each token with itself."""
        loss = self.loss(batch)
        self.losses.append(loss.item())
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Tensor, batch_index: int) -> None:
        """Log and keep the loss."""
        loss = self.loss(batch)
        self.validation_losses.append(loss.item())
        self.log("validation_loss", loss)

    def test_step(self, batch: Tensor, batch_index: int) -> None:
        """Log the loss."""
        self.log("test_loss", self.loss(batch))

    def predict_step(self, batch: Tensor, batch_index: int) -> Tensor:
        """The logits."""
        return self(batch)

    def loss(self, batch: Tensor) -> Tensor:
        """Cross entropy of each token with itself."""
        return F.cross_entropy(self(batch).flatten(0, 1).float(), batch.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW, unless another one was asked for."""
        if self.make_optimizer is not None:
            return self.make_optimizer(self.parameters())
        return torch.optim.AdamW(self.parameters(), lr=self.lr, foreach=False)


def apply_tiny_plan(model: TinyLm, mesh: DeviceMesh, plan: dict[str, ParallelStyle], *, fsdp: bool = False) -> TinyLm:
    """Parallelise `model` over the axes of `mesh`; returns it."""
    parallelize_module(model, mesh["tensor_parallel"], plan)
    if fsdp:
        fully_shard(model, mesh=mesh["data_parallel"])
    return model


def tiny_dataloader(num_samples: int = 16, batch_size: int = 4, length: int = LENGTH) -> DataLoader[Tensor]:
    """The same ``[batch_size, length]`` batches of tokens on every rank, in order."""
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(0, VOCABULARY, (num_samples, length), generator=generator)
    return DataLoader(tokens, batch_size=batch_size)  # type: ignore[arg-type]


def make_trainer(strategy: Strategy | str, **settings: Any) -> L.Trainer:
    """A quiet Trainer of one epoch over the ranks of the default process group, which must exist."""
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": dist.get_world_size(),
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        # Lightning's own shuffles the training data, in another order for each epoch and number of ranks.
        "use_distributed_sampler": False,
    }
    return L.Trainer(strategy=strategy, **(defaults | settings))


@pytest.fixture(scope="session")
def warm_lightning() -> None:
    """Evaluate once in this process: what isinstance and Lightning cache saves each forked rank 0.2 s.

    There is no backward here, as autograd's threads must not exist before the fork.
    """
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False)
    trainer.validate(TinyModule(parallelize=False), tiny_dataloader(), verbose=False)


def full_weights(module: nn.Module) -> dict[str, Tensor]:
    """Copies of all parameters, whole, by name."""
    return {name: full(parameter).clone() for name, parameter in module.named_parameters()}


def full(tensor: Tensor) -> Tensor:
    """The whole of a DTensor, on every rank; any other tensor itself."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


@contextmanager
def captured_messages() -> Iterator[list[str]]:
    """Every warning and every line that is logged at level INFO or above while the block runs."""
    texts: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            texts.append(record.getMessage())

    handler = Handler(logging.INFO)
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield texts
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
        texts.extend(str(warning.message) for warning in caught)
