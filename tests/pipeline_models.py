"""A model that pipelines cut, its data, and what one process makes of them."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_taco.pipeline_parallel import (
    Agreement,
    PipelineConfig,
    PipelineEngine,
    cut,
    host_group,
    make_layout,
)

WIDTH = 16
VOCABULARY = 24


class Residual(nn.Module):
    """A linear beside a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + torch.tanh(self.linear(hidden))


class Chain(nn.Module):
    """Embedding, `num_blocks` blocks, norm and head: ``[B, S]`` tokens to ``[B, S, VOCABULARY]`` logits."""

    def __init__(self, num_blocks: int = 4, *, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Residual() for _ in range(num_blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def pipeline_layers(self) -> list[Any]:
        return [self.embedding, *self.blocks, (self.logits, self.norm, self.head)]

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head(self.norm(hidden))

    def forward(self, tokens: Tensor) -> Tensor:
        output = tokens
        for layer in self.pipeline_layers():
            output = layer[0](output) if isinstance(layer, tuple) else layer(output)
        return output


class Holder(nn.Module):
    """What a LightningModule is to the pipeline: it holds the model, and its step calls it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def step(self, batch: Tensor) -> Tensor:
        return F.cross_entropy(self.model(batch).flatten(0, 1), batch.flatten())


def tokens(batch: int = 8, length: int = 6) -> Tensor:
    return torch.randint(0, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(3))


def one_process(make: Callable[[], nn.Module], batch: Tensor) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients by name of the whole model."""
    holder = Holder(make())
    loss = holder.step(batch)
    loss.backward()
    return loss.item(), {name: each.grad for name, each in holder.named_parameters() if each.grad is not None}


def make_engine(
    holder: nn.Module,
    schedule: str = "1F1B",
    num_microbatches: int = 4,
    config: PipelineConfig | None = None,
    split: list[int] | None = None,
) -> PipelineEngine:
    """A pipeline over all ranks of the default group."""
    group = dist.group.WORLD
    assert group is not None
    cut(holder, make_layout(schedule, group.size()), group.rank(), split)
    host = host_group(group, [range(group.size())])
    return PipelineEngine(holder, Agreement(group, host, torch.device("cpu")), num_microbatches, config)


def train_step(engine: PipelineEngine, batch: Any) -> float:
    """The loss of one step through `engine`; gradients are in ``.grad``."""

    def step(root: Any, part: Any) -> Tensor:
        return Holder.step(root, part)

    outcome, _ = engine.run(batch, step, is_training=True, loss_of=lambda loss: loss)
    return outcome.result.item()
