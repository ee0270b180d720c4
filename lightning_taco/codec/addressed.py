"""Messages that are written to buffers known by their address, other devices' memory among them.

So a message is sent while it is made: the kernel that encodes stores each tile in every buffer that is to have it, and
nothing is copied afterwards. Stores over a link are whole lines, which loads of a kernel that decodes are not. Only
with Triton, since torch knows no tensor by its address.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lightning_taco.codec.checks import require_messages, require_resolved, require_seed, require_value_dtype
from lightning_taco.codec.layout import ALIGNMENT_BYTES
from lightning_taco.config import CodecConfig


@dataclass(frozen=True)
class AddressedMessages:
    """Where messages are to be written: the same place of each of several buffers.

    Args:
        addresses: ``int64 [R * copies]`` on the device that writes: where the buffers begin, multiples of 16. As many
            for each row as it is to have copies, those of the first row first.
        offset_bytes: of a message in its buffer, a multiple of 16.

    Raises:
        ValueError: for an offset that is no multiple of 16.
    """

    addresses: Tensor
    offset_bytes: int = 0

    def __post_init__(self) -> None:
        if self.offset_bytes % ALIGNMENT_BYTES:
            raise ValueError(f"offset_bytes={self.offset_bytes} is not a multiple of {ALIGNMENT_BYTES}: align it.")


def encode_to(
    out: AddressedMessages,
    values: Tensor,
    codec: CodecConfig,
    *,
    seed: int = 0,
    first_block: int = 0,
    row_blocks: int | None = None,
) -> AddressedMessages:
    """As `codec.encode`, into `out`.

    Raises:
        TypeError: for another dtype, or an element that is still ``"auto"``.
        ValueError: for buffers that the rows cannot share out evenly, or a seed out of range.
    """
    require_resolved(codec)
    require_value_dtype("values", values.dtype)
    require_seed(seed)
    num_buffers, num_rows = out.addresses.shape[0], values.shape[0]
    if num_rows == 0 or num_buffers % num_rows:
        raise ValueError(f"{num_buffers} buffers were given for {num_rows} messages; give as many for each of them.")
    from lightning_taco.codec import kernels

    if values.stride(-1) != 1:
        values = values.contiguous()
    numbering = (seed, first_block, row_blocks)
    kernels.encode_triton(values, codec, out.addresses, *numbering, offset_bytes=out.offset_bytes)
    return out


def requantize_to(
    out: AddressedMessages,
    messages: Tensor,
    codec: CodecConfig,
    num_values: int,
    *,
    average: bool = False,
    seed: int = 0,
    first_block: int = 0,
) -> AddressedMessages:
    """As `codec.requantize`, into each buffer of `out`.

    Raises:
        TypeError: for an element that is still ``"auto"``.
        ValueError: for messages that do not fit, or a seed out of range.
    """
    require_messages(messages, codec, num_values)
    require_seed(seed)
    from lightning_taco.codec import kernels

    kernels.requantize_triton(
        messages,
        codec,
        num_values,
        out.addresses,
        average=average,
        seed=seed,
        first_block=first_block,
        offset_bytes=out.offset_bytes,
    )
    return out
