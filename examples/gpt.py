"""A GPT-2 style language model and its tensor-parallel plan.

model = GPT(GPTConfig.preset("350M", vocab_size=8192))
parallelize(model, device_mesh["tensor_parallel"], sequence_parallel=True)
logits = model(tokens)  # [B, S] -> [B, S, V]
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from examples.plans import (
    Parallelism,
    ReplicateParallel,
    apply_plans,
    block_plan,
    check_divisible,
    check_sequence_length,
    initialize_weights,
    model_plan,
    to_matmul_dtype,
)


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """Sizes of a GPT; any vocabulary size works at any tensor-parallel size, the last rank may hold fewer rows."""

    num_layers: int = 4
    hidden_size: int = 256
    num_heads: int = 8
    ffn_size: int | None = None  # None: 4 * hidden_size
    sequence_length: int = 256  # the longest input, in tokens
    vocab_size: int = 50257
    tie_embeddings: bool = False
    activation_checkpointing: bool = False

    def __post_init__(self) -> None:
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"hidden_size={self.hidden_size} is not a multiple of num_heads={self.num_heads}:"
                f" every head needs the same width."
            )

    @property
    def mlp_size(self) -> int:
        """Width of the feed-forward layer."""
        return 4 * self.hidden_size if self.ffn_size is None else self.ffn_size

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> "GPTConfig":
        """The sizes known by `name`, with some of them replaced."""
        if name not in PRESETS:
            raise ValueError(f"There is no GPT preset {name!r}: choose one of {', '.join(PRESETS)}.")
        return replace(PRESETS[name], **overrides)


PRESETS = {
    "tiny": GPTConfig(),
    "350M": GPTConfig(num_layers=24, hidden_size=1024, num_heads=16, sequence_length=2048),
    "2.7B": GPTConfig(num_layers=32, hidden_size=2560, num_heads=32, sequence_length=2048),
    "6.7B": GPTConfig(num_layers=32, hidden_size=4096, num_heads=32, sequence_length=2048),
    "13B": GPTConfig(num_layers=40, hidden_size=5120, num_heads=40, sequence_length=2048),
}


class Attention(nn.Module):
    """Causal self-attention; under tensor parallelism each rank computes whole heads of its own."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.head_size = config.hidden_size // config.num_heads
        self.query = nn.Linear(config.hidden_size, config.hidden_size)
        self.key = nn.Linear(config.hidden_size, config.hidden_size)
        self.value = nn.Linear(config.hidden_size, config.hidden_size)
        self.output = nn.Linear(config.hidden_size, config.hidden_size)
        self.output.init_scale = 1 / math.sqrt(2 * config.num_layers)

    def forward(self, x: Tensor) -> Tensor:
        # [B, S, H / TP] each -> [B, heads / TP, S, head_size]: the number of heads follows from the local part
        query, key, value = (
            projection(x).unflatten(-1, (-1, self.head_size)).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        heads = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.output(heads.transpose(1, 2).flatten(2))  # [B, S, H]


class MLP(nn.Module):
    """Two linear layers with GELU between them."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.hidden_size, config.mlp_size)
        self.down = nn.Linear(config.mlp_size, config.hidden_size)
        self.down.init_scale = 1 / math.sqrt(2 * config.num_layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class Block(nn.Module):
    """Attention and MLP, each behind a LayerNorm and added to the residual stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.activation_checkpointing = config.activation_checkpointing
        self.attention_norm = nn.LayerNorm(config.hidden_size)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.hidden_size)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        if self.activation_checkpointing and torch.is_grad_enabled():
            return checkpoint(self._layers, x, use_reentrant=False)
        return self._layers(x)

    def _layers(self, x: Tensor) -> Tensor:
        x = x + self.attention(to_matmul_dtype(self.attention_norm(x)))
        return x + self.mlp(to_matmul_dtype(self.mlp_norm(x)))


class GPT(nn.Module):
    """GPT-2: learned positions, LayerNorm before each layer, GELU.

    Args:
        config: the sizes.
        seed: of the initial weights, which are the same at every tensor-parallel size. Built under
            `torch.device("meta")`, call `initialize(seed)` once the weights have a device.
    """

    def __init__(self, config: GPTConfig, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.parallelism = Parallelism()
        self.token_embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.position_embedding = nn.Embedding(config.sequence_length, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.final_norm = nn.LayerNorm(config.hidden_size)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.head.weight = self.token_embedding.weight
        if not self.head.weight.is_meta:
            self.initialize(seed)

    def initialize(self, seed: int) -> None:
        """Draw the initial weights."""
        initialize_weights(self, seed)

    def pipeline_layers(self) -> list[Any]:
        """What forward runs, one after another: where a pipeline may cut."""
        return [
            (self.embed, self.token_embedding, self.position_embedding),
            *self.blocks,
            (self.logits, self.final_norm, self.head),
        ]

    def forward(self, tokens: Tensor) -> Tensor:
        """Map token ids [B, S] to logits [B, S, V]; a DTensor split over V under `loss_parallel`."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.logits(x)

    def embed(self, tokens: Tensor) -> Tensor:
        """[B, S] -> [B, S or S / TP, H]."""
        check_sequence_length(tokens.shape[1], self.config.sequence_length, self.parallelism)
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.token_embedding(tokens) + self.position_embedding(positions)

    def logits(self, x: Tensor) -> Tensor:
        """[B, S or S / TP, H] -> [B, S, V]."""
        return self.head(to_matmul_dtype(self.final_norm(x)))


def parallelize(
    model: GPT, tp_mesh: DeviceMesh, *, sequence_parallel: bool, loss_parallel: bool = False, num_slices: int = 1
) -> GPT:
    """Split a GPT over a one-axis mesh, in place; a model that is split already comes back unchanged.

    Args:
        model: on any device, `meta` included.
        tp_mesh: the `tensor_parallel` axis. One rank leaves the model as it is.
        sequence_parallel: hold the residual stream split along the sequence, [B, S / TP, H].
        loss_parallel: leave the logits split over the vocabulary, as a DTensor, for
            `torch.distributed.tensor.parallel.loss_parallel`.
        num_slices: of tokens in which projections back into the residual stream are computed and, where exchanges
            are compressed, sent.

    Raises:
        ValueError: the number of heads, the hidden or the feed-forward size is not a multiple of the mesh's size.
    """
    size = tp_mesh.size()
    if model.parallelism.tensor_parallel_size > 1 or size == 1:
        return model
    config = model.config
    check_divisible(
        {
            "num_heads of GPT (blocks.*.attention)": config.num_heads,
            "hidden_size of GPT (blocks.*.attention.query)": config.hidden_size,
            "ffn_size of GPT (blocks.*.mlp.up)": config.mlp_size,
        },
        size,
    )
    around = model_plan(sequence_parallel=sequence_parallel, loss_parallel=loss_parallel)
    around["position_embedding"] = ReplicateParallel(shard_dim=0 if sequence_parallel else None)
    block = block_plan(
        sequence_parallel=sequence_parallel,
        column=("attention.query", "attention.key", "attention.value", "mlp.up"),
        row=("attention.output", "mlp.down"),
        num_slices=num_slices,
    )
    apply_plans(model, tp_mesh, around, block)
    model.parallelism = Parallelism(size, sequence_parallel, loss_parallel)
    return model
