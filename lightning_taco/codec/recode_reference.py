"""The oracle of `codec.recode`, in plain torch; `codec.kernels_recode` gives the same bits."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_taco.codec.layout import MessageLayout
from lightning_taco.codec.reference import (
    _decode_to_sum_domain,
    _message,
    hadamard_transform_reference,
)
from lightning_taco.config import CodecConfig


def recode_sum_reference(
    messages: Tensor,
    codec: CodecConfig,
    out_codec: CodecConfig,
    num_values: int,
    *,
    factor: float | None = None,
    seed: int = 0,
) -> Tensor:
    """``uint8 [S, R, message_bytes]`` -> the messages of the R sums over S, ``uint8 [R, bytes of out_codec]``."""
    total = _decode_to_sum_domain(messages[0], codec, num_values)
    for source in messages[1:]:
        total = total + _decode_to_sum_domain(source, codec, num_values)
    if factor is not None:
        total = total * factor
    return _message(total, None, MessageLayout.of(num_values, out_codec), out_codec, (seed, 0, None))


def accumulate_reference(message: Tensor, values: Tensor, codec: CodecConfig, *, seed: int = 0) -> Tensor:
    """The message of what ``message``, ``uint8 [1, message_bytes]``, holds plus `values` ``[N]``."""
    num_values = values.numel()
    layout = MessageLayout.of(num_values, codec)
    padded = torch.zeros(layout.num_blocks * codec.block_size, dtype=torch.float32, device=values.device)
    padded[:num_values] = values
    blocks = padded.view(1, layout.num_blocks, codec.block_size)
    if codec.rotation:
        blocks = hadamard_transform_reference(blocks * (1.0 / codec.block_size))
    return _message(_decode_to_sum_domain(message, codec, num_values) + blocks, None, layout, codec, (seed, 0, None))
