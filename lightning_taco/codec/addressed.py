"""Messages that lie in buffers of their own, other devices' memory among them: decoded where they are.

The kernels read them by their addresses, so that fetching and decoding are one pass: what crosses the link is read
once, and nothing is written in between. Only with Triton, since torch knows no tensor by its address.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_taco.codec.checks import require_resolved, require_seed, require_value_dtype
from lightning_taco.codec.layout import ALIGNMENT_BYTES, MessageLayout
from lightning_taco.config import CodecConfig


@dataclass(frozen=True)
class AddressedMessages:
    """One message in each of several buffers, at the same place of each.

    Args:
        addresses: ``int64 [S]`` on the device that reads: where the buffers begin, multiples of 16.
        offset_bytes: of the message in its buffer, a multiple of 16.

    Raises:
        ValueError: for an offset that is no multiple of 16.
    """

    addresses: Tensor
    offset_bytes: int = 0

    def __post_init__(self) -> None:
        if self.offset_bytes % ALIGNMENT_BYTES:
            raise ValueError(f"offset_bytes={self.offset_bytes} is not a multiple of {ALIGNMENT_BYTES}: align it.")

    @property
    def num_messages(self) -> int:
        """S."""
        return self.addresses.shape[0]

    def new_empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor on the device that reads."""
        return torch.empty(shape, dtype=dtype, device=self.addresses.device)


def decode_addressed(messages: AddressedMessages, codec: CodecConfig, out: Tensor) -> Tensor:
    """As `codec.decode`: message r into row r of `out`, ``[S, N]`` or ``[S, segments, L]``."""
    _require(codec, out)
    from lightning_taco.codec import kernels

    return kernels.decode_triton(messages.addresses, codec, out, offset_bytes=messages.offset_bytes)


def decode_sum_addressed(
    messages: AddressedMessages,
    codec: CodecConfig,
    out: Tensor,
    *,
    average: bool = False,
    factor: float | None = None,
) -> Tensor:
    """As `codec.decode_sum`: the sum of all, in their order, into `out` ``[N]``, contiguous."""
    _require(codec, out)
    from lightning_taco.codec import kernels

    kernels.decode_triton(
        messages.addresses,
        codec,
        out.view(1, -1),
        num_sources=messages.num_messages,
        average=average,
        factor=factor,
        offset_bytes=messages.offset_bytes,
    )
    return out


def requantize_addressed(
    messages: AddressedMessages,
    codec: CodecConfig,
    num_values: int,
    out: Tensor,
    *,
    average: bool = False,
    seed: int = 0,
    first_block: int = 0,
) -> Tensor:
    """As `codec.requantize`: the message of the sum of all, into `out` ``uint8 [1, message_bytes]``."""
    require_resolved(codec)
    require_seed(seed)
    message_bytes = MessageLayout.of(num_values, codec).message_bytes
    if out.dtype != torch.uint8 or out.shape != (1, message_bytes) or not out.is_contiguous():
        raise ValueError(
            f"out is {out.dtype} {tuple(out.shape)}; {num_values} values in {codec} need uint8 [1, {message_bytes}]."
        )
    from lightning_taco.codec import kernels

    return kernels.requantize_triton(
        messages.addresses,
        codec,
        num_values,
        out,
        average=average,
        seed=seed,
        first_block=first_block,
        offset_bytes=messages.offset_bytes,
    )


def _require(codec: CodecConfig, out: Tensor) -> None:
    require_resolved(codec)
    require_value_dtype("decoded values", out.dtype)
