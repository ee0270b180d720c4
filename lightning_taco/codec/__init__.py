"""Tensor to ``uint8`` message and back: `encode`, `decode`, `decode_sum` and `requantize`.

`recode_sum` and `accumulate` (in `codec.recode`) go from messages of one codec to messages of another, and add values
to a message. `TahQuant` and `FixedPoint` make one message of one tensor, for transfers between pipeline stages.

CUDA tensors go through the fused Triton kernels (one launch each), all others, and CUDA without triton, through the
torch reference. Both give the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_taco.codec import reference
from lightning_taco.codec.checks import (
    VALUE_DTYPES,
    require_messages,
    require_resolved,
    require_seed,
    require_value_dtype,
    require_whole_words,
    uses_triton,
)
from lightning_taco.codec.fixed_point import FixedPoint
from lightning_taco.codec.layout import MessageLayout
from lightning_taco.codec.recode import accumulate, recode_sum
from lightning_taco.codec.tah_quant import TahQuant
from lightning_taco.config import CodecConfig

__all__ = [
    "VALUE_DTYPES",
    "FixedPoint",
    "MessageLayout",
    "TahQuant",
    "accumulate",
    "decode",
    "decode_sum",
    "encode",
    "recode_sum",
    "requantize",
]


def encode(
    values: Tensor,
    codec: CodecConfig,
    *,
    seed: int = 0,
    first_block: int = 0,
    row_blocks: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Encode each row of `values` into a message of its own.

    Args:
        values: bf16, fp16 or fp32, ``[R, N]``; one message per row, one row per destination. Or ``[R, S, L]``, a view
            of rows that lie in S segments of L values, L a multiple of the block, read where they are; N = S L.
        codec: how; its `element` may not be ``"auto"``.
        seed: of stochastic rounding, from 0 to 2^62 - 1; the same seed gives the same bits on every device.
        first_block: number of the first block, for stochastic rounding: a part of a row that is encoded by itself has
            the bits that it has in the whole row.
        row_blocks: numbers from a row's first block to that of the next; left out, as many as it has blocks.
        out: ``uint8 [R, message_bytes]``, contiguous, to write to.

    Returns:
        ``uint8 [R, message_bytes]``, with `message_bytes` as in `MessageLayout`. The padding at the end of a message
        has no defined content.

    Raises:
        TypeError: for another dtype, or an element that is still ``"auto"``.
        ValueError: for a tensor of other dims, segments that cut blocks, an `out` that does not fit, or a seed out of
            range.

    Cost: reads the values once, writes the message once; one launch.

    Source: TACO, arXiv 2604.24088, section 4; differences in `codec.reference`.

    Example:
        >>> codec = CodecConfig(element="int8", block_size=32)
        >>> message = encode(torch.ones(1, 40), codec)
        >>> message.shape, decode(message, codec, 40, torch.float32).eq(1).all().item()
        (torch.Size([1, 80]), True)
    """
    _require_values(values, codec)
    require_seed(seed)
    layout = MessageLayout.of(values.shape[1:].numel(), codec)
    _require_out(out, (values.shape[0], layout.message_bytes), torch.uint8, values)
    if not uses_triton(values):
        messages = reference.encode_reference(
            values.flatten(1), codec, seed=seed, first_block=first_block, row_blocks=row_blocks
        )
        return messages if out is None else out.copy_(messages)
    from lightning_taco.codec import kernels

    if values.stride(-1) != 1:
        values = values.contiguous()
    if out is None:
        out = values.new_empty(values.shape[0], layout.message_bytes, dtype=torch.uint8)
    return kernels.encode_triton(values, codec, out, seed=seed, first_block=first_block, row_blocks=row_blocks)


def decode(
    messages: Tensor,
    codec: CodecConfig,
    num_values: int,
    dtype: torch.dtype,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Decode each row of `messages`.

    Args:
        messages: ``uint8 [R, message_bytes]``, contiguous.
        codec: the one that encoded them.
        num_values: N, values in each message.
        dtype: bf16, fp16 or fp32; sums and scales are fp32 whatever it is.
        out: ``[R, N]`` of `dtype` with contiguous rows, to write to; or ``[R, S, L]``, as for `encode`.

    Returns:
        ``[R, N]`` of `dtype`, or `out`. A block that held a NaN or an Inf is NaN.

    Raises:
        TypeError: for another dtype, or an element that is still ``"auto"``.
        ValueError: for messages whose size does not fit `num_values` and `codec`, or an `out` that does not fit.

    Cost: reads the messages once, writes the values once; one launch.
    """
    require_messages(messages, codec, num_values)
    require_value_dtype("decoded values", dtype)
    _require_rows_out(out, (messages.shape[0], num_values), dtype, messages, codec)
    if not uses_triton(messages):
        values = reference.decode_reference(messages, codec, num_values, dtype)
        return values if out is None else out.copy_(values.view(out.shape))
    from lightning_taco.codec import kernels

    if out is None:
        out = messages.new_empty(messages.shape[0], num_values, dtype=dtype)
    return kernels.decode_triton(messages, codec, out)


def decode_sum(
    messages: Tensor,
    codec: CodecConfig,
    num_values: int,
    dtype: torch.dtype,
    *,
    average: bool = False,
    factor: float | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Decode the rows of `messages` and add them in fp32, in row order.

    Args:
        messages: ``uint8 [S, message_bytes]``, one from each source rank, in rank order.
        codec: the one that encoded them.
        num_values: N, values in each message.
        dtype: of the result.
        average: multiply the sum by 1/S, in fp32, before it is rounded to `dtype`.
        factor: what to multiply the sum by in place of 1/S or 1, at the same point.
        out: ``[N]`` of `dtype`, contiguous, to write to.

    Returns:
        ``[N]`` of `dtype`.

    Raises:
        TypeError: for another dtype, or an element that is still ``"auto"``.
        ValueError: for messages whose size does not fit `num_values` and `codec`, an `out` that does not fit, or both
            `average` and `factor`.

    Cost: reads the S messages once, writes N values once; one rotation; one launch.
    """
    if average and factor is not None:
        raise ValueError(f"average=True and factor={factor} were both given; give one of them.")
    require_messages(messages, codec, num_values)
    _require_sources(messages)
    require_value_dtype("decoded values", dtype)
    _require_out(out, (num_values,), dtype, messages)
    if not uses_triton(messages):
        total = reference.decode_sum_reference(messages, codec, num_values, dtype, average=average, factor=factor)
        return total if out is None else out.copy_(total)
    from lightning_taco.codec import kernels

    if out is None:
        out = messages.new_empty(num_values, dtype=dtype)
    row, num_sources = out.view(1, num_values), messages.shape[0]
    kernels.decode_triton(messages, codec, row, num_sources=num_sources, average=average, factor=factor)
    return out


def requantize(
    messages: Tensor,
    codec: CodecConfig,
    num_values: int,
    *,
    average: bool = False,
    seed: int = 0,
    first_block: int = 0,
    out: Tensor | None = None,
) -> Tensor:
    """The message of the sum of `messages`: decode, add in fp32 in row order, quantise; all in the rotated domain.

    Args:
        messages: ``uint8 [S, message_bytes]``, one from each source rank, in rank order.
        codec: the one that encoded them, and that encodes the sum.
        num_values: N, values in each message.
        average: multiply the sum by 1/S, in fp32.
        seed: of stochastic rounding, as for `encode`.
        first_block: as for `encode`.
        out: ``uint8 [1, message_bytes]`` to write to.

    Returns:
        ``uint8 [1, message_bytes]``.

    Raises:
        TypeError: for another dtype, or an element that is still ``"auto"``.
        ValueError: for messages whose size does not fit `num_values` and `codec`, or an `out` that does not fit.

    Cost: reads the S messages once, writes one; no rotation; one launch.

    Source: the middle step of TACO's two-shot all-reduce; the rotation is linear and common to all ranks, so the sum
    may stay rotated, which saves the paper's inverse and second rotation.
    """
    require_messages(messages, codec, num_values)
    _require_sources(messages)
    require_seed(seed)
    _require_out(out, (1, messages.shape[1]), torch.uint8, messages)
    if not uses_triton(messages):
        message = reference.requantize_reference(
            messages, codec, num_values, average=average, seed=seed, first_block=first_block
        )
        return message if out is None else out.copy_(message)
    from lightning_taco.codec import kernels

    if out is None:
        out = messages.new_empty(1, messages.shape[1])
    return kernels.requantize_triton(
        messages, codec, num_values, out, average=average, seed=seed, first_block=first_block
    )


def _require_values(values: Tensor, codec: CodecConfig) -> None:
    require_resolved(codec)
    require_value_dtype("values", values.dtype)
    if values.dim() not in (2, 3):
        raise ValueError(f"values have shape {tuple(values.shape)}; [rows, values] is needed, one row per message.")
    _require_whole_segments("values", values, codec)


def _require_sources(messages: Tensor) -> None:
    if messages.shape[0] == 0:
        raise ValueError("there is no message to sum; at least one row is needed.")


def _require_whole_segments(what: str, values: Tensor, codec: CodecConfig) -> None:
    if values.dim() == 3 and values.shape[1] > 1 and values.shape[2] % codec.block_size:
        raise ValueError(
            f"{what} have segments of {values.shape[2]} values, which cut blocks of {codec.block_size}; "
            "pass values.flatten(1)."
        )


def _require_rows_out(
    out: Tensor | None, shape: tuple[int, int], dtype: torch.dtype, like: Tensor, codec: CodecConfig
) -> None:
    """As `_require_out`, for rows that may have gaps and lie in segments."""
    if out is None or out.dim() != 3:
        return _require_out(out, shape, dtype, like, may_have_gaps=True)
    _require_whole_segments("out", out, codec)
    given = (shape[0], out.shape[1], shape[1] // max(1, out.shape[1]))
    return _require_out(out, given, dtype, like, may_have_gaps=True)


def _require_out(
    out: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, like: Tensor, *, may_have_gaps: bool = False
) -> None:
    """Refuse a buffer that a kernel would write past, or in another format; `may_have_gaps` is about its rows."""
    if out is None:
        return
    is_dense = out.is_contiguous() or (may_have_gaps and out.stride(-1) == 1)
    if out.shape != shape or out.dtype != dtype or out.device != like.device or not is_dense:
        raise ValueError(
            f"out is {out.dtype} {tuple(out.shape)} on {out.device}{'' if is_dense else ', not contiguous'}; "
            f"{dtype} {shape} on {like.device}, contiguous, is needed."
        )
    if dtype == torch.uint8:
        require_whole_words("out", out)
