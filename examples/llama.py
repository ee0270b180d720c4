"""A LLaMA-style language model (RMSNorm, SwiGLU, RoPE, grouped-query attention) and its tensor-parallel plan.

model = Llama(LlamaConfig.preset("1B", vocab_size=32000))
parallelize(model, device_mesh["tensor_parallel"], sequence_parallel=True)
logits = model(tokens)  # [B, S] -> [B, S, V]
"""

import functools
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
    apply_plans,
    block_plan,
    check_divisible,
    check_sequence_length,
    initialize_weights,
    model_plan,
    to_matmul_dtype,
)


@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """Sizes of a LLaMA; any vocabulary size works at any tensor-parallel size, the last rank may hold fewer rows."""

    num_layers: int = 4
    hidden_size: int = 256
    num_heads: int = 8
    num_kv_heads: int = 4  # each is shared by num_heads / num_kv_heads query heads
    ffn_size: int = 704
    sequence_length: int = 256  # the longest input, in tokens
    vocab_size: int = 128256
    tie_embeddings: bool = False
    rope_theta: float = 500_000.0
    activation_checkpointing: bool = False

    def __post_init__(self) -> None:
        if self.hidden_size % (2 * self.num_heads):
            raise ValueError(
                f"hidden_size={self.hidden_size} is not a multiple of 2 * num_heads={2 * self.num_heads}:"
                f" every head needs the same even width (rotary positions turn pairs of values)."
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}:"
                f" every key/value head needs the same number of query heads."
            )

    @property
    def head_size(self) -> int:
        """Width of one head."""
        return self.hidden_size // self.num_heads

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> "LlamaConfig":
        """The sizes known by `name`, with some of them replaced."""
        if name not in PRESETS:
            raise ValueError(f"There is no LLaMA preset {name!r}: choose one of {', '.join(PRESETS)}.")
        return replace(PRESETS[name], **overrides)


PRESETS = {
    "tiny": LlamaConfig(),
    "1B": LlamaConfig(
        num_layers=16,
        hidden_size=2048,
        num_heads=32,
        num_kv_heads=8,
        ffn_size=8192,
        sequence_length=4096,
        tie_embeddings=True,
    ),
    "8B": LlamaConfig(
        num_layers=32, hidden_size=4096, num_heads=32, num_kv_heads=8, ffn_size=14336, sequence_length=4096
    ),
}


def rotary_table(sequence_length: int, head_size: int, theta: float, device: torch.device) -> Tensor:
    """Cosines and sines of the rotary positions, fp32 [2, S, head_size / 2].

    Computed anew in each step, which costs next to nothing: a buffer would be cast to half precision with the
    rest of the model, and 16 bits do not hold the position 2047.
    """
    frequencies = theta ** -(torch.arange(0, head_size, 2, device=device, dtype=torch.float32) / head_size)
    angles = torch.outer(torch.arange(sequence_length, device=device, dtype=torch.float32), frequencies)
    return torch.stack((angles.cos(), angles.sin()))


def apply_rotary(x: Tensor, table: Tensor) -> Tensor:
    """Turn the pairs (i, i + head_size / 2) of x [B, heads, S, head_size] by their position's angles."""
    cos, sin = table.unbind(0)
    first, second = x.to(torch.promote_types(x.dtype, table.dtype)).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Causal grouped-query attention; under tensor parallelism each rank computes whole groups of its own."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_size = config.head_size
        kv_size = config.num_kv_heads * config.head_size
        self.query = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.key = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.value = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.output = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.output.init_scale = 1 / math.sqrt(2 * config.num_layers)

    def forward(self, x: Tensor, *, rotary: Tensor) -> Tensor:
        # [B, S, width / TP] each -> [B, heads / TP, S, head_size]: the number of heads follows from the local part
        query, key, value = (
            projection(x).unflatten(-1, (-1, self.head_size)).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        query, key = apply_rotary(query, rotary), apply_rotary(key, rotary)
        grouped = query.shape[1] != key.shape[1]
        heads = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)
        return self.output(heads.transpose(1, 2).flatten(2))  # [B, S, H]


class MLP(nn.Module):
    """SwiGLU: silu(gate(x)) * up(x), projected back."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.hidden_size, config.ffn_size, bias=False)
        self.up = nn.Linear(config.hidden_size, config.ffn_size, bias=False)
        self.down = nn.Linear(config.ffn_size, config.hidden_size, bias=False)
        self.down.init_scale = 1 / math.sqrt(2 * config.num_layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Attention and MLP, each behind an RMSNorm and added to the residual stream."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.activation_checkpointing = config.activation_checkpointing
        self.attention_norm = nn.RMSNorm(config.hidden_size, eps=1e-5)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.hidden_size, eps=1e-5)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, rotary: Tensor) -> Tensor:
        if self.activation_checkpointing and torch.is_grad_enabled():
            return checkpoint(self._layers, x, rotary, use_reentrant=False)
        return self._layers(x, rotary)

    def _layers(self, x: Tensor, rotary: Tensor) -> Tensor:
        x = x + self.attention(to_matmul_dtype(self.attention_norm(x)), rotary=rotary)
        return x + self.mlp(to_matmul_dtype(self.mlp_norm(x)))


class Llama(nn.Module):
    """LLaMA: rotary positions, RMSNorm before each layer, SwiGLU, grouped-query attention, no biases.

    Args:
        config: the sizes.
        seed: of the initial weights, which are the same at every tensor-parallel size. Built under
            `torch.device("meta")`, call `initialize(seed)` once the weights have a device.
    """

    def __init__(self, config: LlamaConfig, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.parallelism = Parallelism()
        self.token_embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.final_norm = nn.RMSNorm(config.hidden_size, eps=1e-5)
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
        blocks = [(functools.partial(self.run_block, block), block) for block in self.blocks]
        return [(self.embed, self.token_embedding), *blocks, (self.logits, self.final_norm, self.head)]

    def forward(self, tokens: Tensor) -> Tensor:
        """Map token ids [B, S] to logits [B, S, V]; a DTensor split over V under `loss_parallel`."""
        x = self.embed(tokens)
        rotary = self.rotary(x)
        for block in self.blocks:
            x = block(x, rotary)
        return self.logits(x)

    def embed(self, tokens: Tensor) -> Tensor:
        """[B, S] -> [B, S or S / TP, H]."""
        check_sequence_length(tokens.shape[1], self.config.sequence_length, self.parallelism)
        return self.token_embedding(tokens)

    def run_block(self, block: nn.Module, x: Tensor) -> Tensor:
        """One block alone, as a pipeline runs it; each computes the rotary table, so that none travels."""
        return block(x, self.rotary(x))

    def rotary(self, x: Tensor) -> Tensor:
        """The table for all positions of x, of which a rank may hold a part."""
        parts = self.parallelism.tensor_parallel_size if self.parallelism.sequence_parallel else 1
        return rotary_table(x.shape[1] * parts, self.config.head_size, self.config.rope_theta, x.device)

    def logits(self, x: Tensor) -> Tensor:
        """[B, S or S / TP, H] -> [B, S, V]."""
        return self.head(to_matmul_dtype(self.final_norm(x)))


def parallelize(
    model: Llama, tp_mesh: DeviceMesh, *, sequence_parallel: bool, loss_parallel: bool = False, num_slices: int = 1
) -> Llama:
    """Split a LLaMA over a one-axis mesh, in place; a model that is split already comes back unchanged.

    Args:
        model: on any device, `meta` included.
        tp_mesh: the `tensor_parallel` axis. One rank leaves the model as it is.
        sequence_parallel: hold the residual stream split along the sequence, [B, S / TP, H].
        loss_parallel: leave the logits split over the vocabulary, as a DTensor, for
            `torch.distributed.tensor.parallel.loss_parallel`.
        num_slices: of tokens in which projections back into the residual stream are computed and, where exchanges
            are compressed, sent.

    Raises:
        ValueError: a number of heads, the hidden or the feed-forward size is not a multiple of the mesh's size.
    """
    size = tp_mesh.size()
    if model.parallelism.tensor_parallel_size > 1 or size == 1:
        return model
    config = model.config
    check_divisible(
        {
            "num_heads of Llama (blocks.*.attention.query)": config.num_heads,
            "num_kv_heads of Llama (blocks.*.attention.key)": config.num_kv_heads,
            "hidden_size of Llama (blocks.*.attention.query)": config.hidden_size,
            "ffn_size of Llama (blocks.*.mlp.up)": config.ffn_size,
        },
        size,
    )
    around = model_plan(sequence_parallel=sequence_parallel, loss_parallel=loss_parallel)
    block = block_plan(
        sequence_parallel=sequence_parallel,
        column=("attention.query", "attention.key", "attention.value", "mlp.gate", "mlp.up"),
        row=("attention.output", "mlp.down"),
        num_slices=num_slices,
    )
    apply_plans(model, tp_mesh, around, block)
    model.parallelism = Parallelism(size, sequence_parallel, loss_parallel)
    return model
