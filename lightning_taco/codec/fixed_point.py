"""`FixedPoint`: gradients between pipeline stages in 6 to 8 bits, as one ``uint8`` message."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from lightning_taco import codec as messages
from lightning_taco.codec.checks import require_message, require_value_dtype
from lightning_taco.codec.layout import MessageLayout
from lightning_taco.config import ROUNDINGS, CodecConfig, require_one_of

BLOCK_SIZE = 64
ELEMENT_OF_BITS: dict[int, Literal["int6", "int7", "int8"]] = {6: "int6", 7: "int7", 8: "int8"}


@dataclass(frozen=True, kw_only=True)
class FixedPoint:
    """Integers of a few bits, symmetric about zero, with one fp32 scale for each 64 consecutive values; no rotation.

    Symmetric, since gradients lie about zero: a gradient of zero, as of a masked token, stays exactly zero, which a
    range from minimum to maximum would move by up to half a step, and a block needs no second number.

    Args:
        bits: of a code: 6, 7 or 8; half a bit a value more for the scales.
        rounding: ``"nearest"``, or ``"stochastic"``: without error on average, by a seed.

    Raises:
        ValueError: for another number of bits, or another rounding.

    Example:
        >>> codec = FixedPoint(bits=6)
        >>> gradient = torch.randn(2, 10, 64)
        >>> message = codec.encode(gradient)
        >>> 8 * message.numel() / gradient.numel()
        6.5
    """

    bits: Literal[6, 7, 8] = 8
    rounding: Literal["nearest", "stochastic"] = "nearest"

    def __post_init__(self) -> None:
        require_one_of("bits", self.bits, tuple(ELEMENT_OF_BITS))
        require_one_of("rounding", self.rounding, ROUNDINGS)

    @cached_property
    def codec(self) -> CodecConfig:
        """The codec that this is: plain integers, blocks of 64."""
        element = ELEMENT_OF_BITS[self.bits]
        return CodecConfig(element=element, block_size=BLOCK_SIZE, rotation=False, rounding=self.rounding)

    def message_bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """Bytes of the message of a tensor, known from its shape alone.

        Args:
            shape: any; values follow one another over all dims, so blocks span tokens unless 64 divides the channels.
            dtype: bf16, fp16 or fp32; all take the same.

        Raises:
            TypeError: for another dtype.
        """
        require_value_dtype("values", dtype)
        return MessageLayout.of(math.prod(shape), self.codec).message_bytes

    @torch.no_grad()
    def encode(self, tensor: Tensor, *, seed: int = 0) -> Tensor:
        """Encode a tensor.

        Args:
            tensor: bf16, fp16 or fp32, of any shape and strides.
            seed: of stochastic rounding, from 0 to 2^62 - 1.

        Returns:
            ``uint8 [message_bytes]``, laid out as in `codec.layout`.

        Raises:
            TypeError: for another dtype.
            ValueError: for a seed out of range.

        Cost: reads the tensor once, writes the message once; one launch.

        Source: TAH-Quant, arXiv 2506.01352, which names 6 to 8 bits of fixed point for the backward direction.
        """
        return messages.encode(tensor.reshape(1, -1), self.codec, seed=seed).view(-1)

    @torch.no_grad()
    def decode(self, message: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Decode a message.

        Args:
            message: ``uint8 [message_bytes]``, contiguous.
            shape: of the tensor that was encoded, by the same settings.
            dtype: of the result, bf16, fp16 or fp32.

        Returns:
            A tensor of `shape` and `dtype`. A block that held a NaN or an Inf is NaN.

        Raises:
            TypeError: for another dtype.
            ValueError: for a message whose size does not fit.

        Cost: reads the message once, writes the tensor once; one launch.
        """
        require_message(message, self.message_bytes(shape, dtype), f"a tensor {tuple(shape)} in {self}")
        return messages.decode(message.view(1, -1), self.codec, math.prod(shape), dtype).view(shape)
