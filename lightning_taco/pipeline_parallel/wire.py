"""How one tensor becomes one ``uint8`` message between two stages: what a codec for transfers is, and which there are.

Both sides of a transfer know shape, dtype and codec before the first send, and so the size of every message.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from lightning_taco.codec import VALUE_DTYPES, FixedPoint, MessageLayout, TahQuant, decode, encode
from lightning_taco.config import CodecConfig


class TransferCodec(Protocol):
    """Tensor to message and back. A NaN or an Inf makes at least its block non-finite."""

    def message_bytes(self, shape: torch.Size, dtype: torch.dtype) -> int:
        """Size of the message of a tensor of this shape and dtype, whatever its values."""
        ...

    def encode(self, tensor: Tensor, *, seed: int = 0) -> Tensor:
        """The message of `tensor`: ``uint8 [message_bytes]``; `seed` is that of stochastic rounding."""
        ...

    def decode(self, message: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """The tensor that was encoded, of this shape and dtype."""
        ...


class BlockCodec:
    """The codecs of `lightning_taco.codec` as a `TransferCodec`: blocks run over the values in memory order.

    Args:
        config: which; its `element` is not ``"auto"``.
    """

    def __init__(self, config: CodecConfig) -> None:
        self.config = config

    def message_bytes(self, shape: torch.Size, dtype: torch.dtype) -> int:
        """Size of a message, scales and padding included."""
        return MessageLayout.of(shape.numel(), self.config).message_bytes

    def encode(self, tensor: Tensor, *, seed: int = 0) -> Tensor:
        """One launch; reads the tensor once."""
        return encode(tensor.reshape(1, -1), self.config, seed=seed).reshape(-1)

    def decode(self, message: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """One launch; writes the tensor once."""
        return decode(message.view(1, -1), self.config, shape.numel(), dtype).view(shape)

    def __str__(self) -> str:
        return f"{self.config}, {self.config.bits_per_value:g} bits a value"


NAMED_CODECS: dict[str, TransferCodec] = {
    "tah_quant": TahQuant(),
    "fixed_point_8": FixedPoint(bits=8),
    "fixed_point_7": FixedPoint(bits=7),
    "fixed_point_6": FixedPoint(bits=6),
}
"""Codecs for transfers by name."""


def transfer_codec(choice: CodecConfig | str) -> TransferCodec:
    """The codec that a `PipelineConfig` names."""
    return BlockCodec(choice) if isinstance(choice, CodecConfig) else NAMED_CODECS[choice]


def can_encode(dtype: torch.dtype) -> bool:
    """Whether tensors of `dtype` may be compressed: floating point that codecs take; integers and booleans never."""
    return dtype in VALUE_DTYPES
