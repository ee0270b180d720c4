"""Small models that several test files share, their tensor-parallel plans, and a session in scope around them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

# DTensor imports it at its first operation: once here, or 1.2 s in each forked rank of each test.
import torch._dynamo
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
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

from lightning_taco.config import CompressionConfig
from lightning_taco.dtensor import CompressionSession, install, remove

HIDDEN = 64
VOCABULARY = 50
EVERYTHING = CompressionConfig(min_bytes=0)


class Mlp(nn.Module):
    """Two linears, the first cut by columns and the second by rows."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(HIDDEN, 4 * HIDDEN)
        self.down = nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(hidden)))


class Block(nn.Module):
    """A residual around a norm and an MLP; `checkpointing` is ``None``, ``"non-reentrant"`` or ``"reentrant"``."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.mlp = Mlp()
        self.dropout = nn.Dropout(0.1)
        self.checkpointing: str | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        if self.checkpointing is None:
            return hidden + self._branch(hidden)
        return hidden + checkpoint(self._branch, hidden, use_reentrant=self.checkpointing == "reentrant")

    def _branch(self, hidden: Tensor) -> Tensor:
        return self.dropout(self.mlp(self.norm(hidden)))


class TinyLm(nn.Module):
    """Embedding, `num_blocks` blocks, a head: ``[B, S]`` tokens to ``[B, S, VOCABULARY]`` logits."""

    def __init__(self, num_blocks: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def make_model(mesh: DeviceMesh, *, sequence_parallel: bool = False, num_blocks: int = 2) -> TinyLm:
    """A `TinyLm` with the same weights on every rank and at every world size, parallelised over `mesh`."""
    torch.manual_seed(0)
    model = TinyLm(num_blocks).to(mesh.device_type)
    parallelize_module(model, mesh, make_plan(num_blocks, sequence_parallel=sequence_parallel))
    return model


def make_plan(num_blocks: int, *, sequence_parallel: bool) -> dict[str, ParallelStyle]:
    """The tensor-parallel plan of a `TinyLm`."""
    if not sequence_parallel:
        plan: dict[str, ParallelStyle] = {
            "embedding": RowwiseParallel(input_layouts=Replicate()),
            "head": ColwiseParallel(output_layouts=Replicate()),
        }
        for index in range(num_blocks):
            plan[f"blocks.{index}.mlp.up"] = ColwiseParallel()
            plan[f"blocks.{index}.mlp.down"] = RowwiseParallel()
        return plan
    plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    for index in range(num_blocks):
        block = f"blocks.{index}"
        plan[f"{block}.norm"] = SequenceParallel()
        plan[f"{block}.mlp"] = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
        plan[f"{block}.mlp.up"] = ColwiseParallel()
        plan[f"{block}.mlp.down"] = RowwiseParallel(output_layouts=Shard(1))
    return plan


def make_tokens(batch: int = 2, length: int = 8) -> Tensor:
    """The same ``[batch, length]`` tokens on every rank."""
    return torch.randint(0, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(7))


def loss_of(model: Callable[[Tensor], Tensor], tokens: Tensor) -> Tensor:
    """Cross entropy of each token with itself."""
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def train_step(
    model: nn.Module, tokens: Tensor, session: CompressionSession | None = None
) -> tuple[Tensor, list[Tensor]]:
    """Loss and the local gradients of one forward and backward, in the scope of `session` if there is one."""
    model.zero_grad()
    if session is None:
        loss = loss_of(model, tokens)
        loss.backward()
    else:
        with session.scope(is_new_step=True):
            loss = loss_of(model, tokens)
        with session.scope():
            loss.backward()
    return loss.detach(), [local(parameter.grad).clone() for parameter in model.parameters()]


def local(tensor: Any) -> Tensor:
    """The local part of a DTensor, any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def tensor_parallel_mesh(device: str = "cpu") -> DeviceMesh:
    """All ranks on one axis."""
    return init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("tensor_parallel",))


@contextmanager
def installed_session(
    mesh: DeviceMesh, config: CompressionConfig = EVERYTHING, module: nn.Module | None = None
) -> Iterator[CompressionSession]:
    """A session on `mesh` (one axis), attached to `module`, with the seam installed; all undone at the end."""
    session = CompressionSession(config, mesh.get_group())
    install()
    try:
        if module is not None:
            session.attach(module)
        yield session
    finally:
        remove()
        session.detach()
