"""Messages made of messages: `recode_sum` from one codec to another, and `accumulate`, which adds values to a message.

Both stay in the domain that is quantised, rotated or not, so the two codecs of a sum, or the codec and what is added,
share the block and its rotation. CUDA tensors take one Triton launch, all others the torch reference, with the same
bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_taco.codec.checks import (
    require_resolved,
    require_seed,
    require_value_dtype,
    require_whole_words,
    uses_triton,
)
from lightning_taco.codec.layout import MessageLayout
from lightning_taco.codec.recode_reference import accumulate_reference, recode_sum_reference
from lightning_taco.config import CodecConfig


def recode_sum(
    messages: Tensor,
    codec: CodecConfig,
    out_codec: CodecConfig,
    num_values: int,
    *,
    factor: float | None = None,
    seed: int = 0,
) -> Tensor:
    """Add messages over their sources, in fp32 and in order, and quantise each sum by another codec.

    Args:
        messages: ``uint8 [S, R, message_bytes]``: R messages from each of S sources.
        codec: the one that encoded them.
        out_codec: the one that encodes the sums; of the same block size and rotation.
        num_values: N, values in each message.
        factor: what to multiply the sums by, in fp32; left out, nothing.
        seed: of stochastic rounding, from 0 to 2^62 - 1.

    Returns:
        ``uint8 [R, message_bytes of out_codec]``.

    Raises:
        ValueError: for codecs that do not share a domain, messages that do not fit, or a seed out of range.

    Cost: reads the S R messages once, writes R; no rotation; one launch.

    Source: SDP4Bit, arXiv 2410.15526: the step from 8 bits inside a node to 4 bits between nodes, still rotated.
    """
    require_shared_domain(codec, out_codec)
    require_seed(seed)
    message_bytes = MessageLayout.of(num_values, codec).message_bytes
    if messages.dtype != torch.uint8 or messages.dim() != 3 or messages.shape[2] != message_bytes:
        raise ValueError(
            f"messages have shape {tuple(messages.shape)} and dtype {messages.dtype}; {num_values} values in {codec} "
            f"need uint8 [sources, rows, {message_bytes}]."
        )
    if not messages.is_contiguous() or messages.shape[0] == 0:
        raise ValueError("messages must be contiguous and of at least one source; pass messages.contiguous().")
    require_whole_words("the tensor of messages", messages)
    if not uses_triton(messages):
        return recode_sum_reference(messages, codec, out_codec, num_values, factor=factor, seed=seed)
    from lightning_taco.codec import kernels_recode

    return kernels_recode.recode_sum_triton(messages, codec, out_codec, num_values, factor=factor, seed=seed)


def accumulate(message: Tensor, values: Tensor, codec: CodecConfig, *, seed: int = 0) -> Tensor:
    """Add `values` to what `message` holds, in place: decode, add in fp32, quantise, in one launch.

    Args:
        message: ``uint8 [1, message_bytes]``, contiguous.
        values: bf16, fp16 or fp32, ``[N]``, contiguous.
        codec: the one that encoded the message.
        seed: of stochastic rounding, from 0 to 2^62 - 1.

    Returns:
        `message`.

    Raises:
        TypeError: for another dtype.
        ValueError: for a codec without one plain scale a block, a message that does not fit, or a seed out of range.

    Cost: reads the message and the values once, writes the message once; one rotation if the codec has one.

    Source: AGoQ, arXiv 2605.00539, QuanGrad. We add in fp32 where the paper adds in bf16.
    """
    require_shared_domain(codec, codec)
    require_seed(seed)
    message_bytes = MessageLayout.of(values.numel(), codec).message_bytes
    require_value_dtype("values", values.dtype)
    if values.dim() != 1 or not values.is_contiguous():
        raise ValueError(f"values have shape {tuple(values.shape)}; one contiguous dim is needed: values.reshape(-1).")
    if message.dtype != torch.uint8 or message.shape != (1, message_bytes) or not message.is_contiguous():
        raise ValueError(
            f"message is {message.dtype} {tuple(message.shape)}; {values.numel()} values in {codec} need a contiguous "
            f"uint8 [1, {message_bytes}]."
        )
    require_whole_words("message", message)
    if not uses_triton(message):
        return message.copy_(accumulate_reference(message, values, codec, seed=seed))
    from lightning_taco.codec import kernels_recode

    return kernels_recode.accumulate_triton(message, values, codec, seed=seed)


def require_shared_domain(codec: CodecConfig, other: CodecConfig) -> None:
    """Refuse codecs between whose messages values would have to be rotated, or scaled in two ways.

    Raises:
        TypeError: for an element that is still ``"auto"``.
        ValueError: naming what differs.
    """
    for each in (codec, other):
        require_resolved(each)
        if each.scale_mode != "merged":
            raise ValueError(f"scale_mode={each.scale_mode!r} cannot be added up here; use scale_mode='merged'.")
    if (codec.block_size, codec.rotation) != (other.block_size, other.rotation):
        raise ValueError(
            f"{codec} and {other} do not share a block: give both the same block_size and the same rotation."
        )
