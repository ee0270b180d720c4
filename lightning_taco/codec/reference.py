"""The oracle: the codec in plain torch, written to be read.

All functions work on any device. In ``scale_mode="merged"`` the Triton kernels produce the same bits, and so do
they in ``"dual"``: every rounding step is spelled out, sums run in the same order, and nothing is fused.

Per block ``b`` of G values, in fp32:

    y         = H_G b / G                   H_G the Sylvester Hadamard matrix; y = b without rotation
    amax      = max |y|
    scale     = Qmax / amax                 Qmax = 448 (E4M3), 57344 (E5M2), 127, 31, 15 or 7 (INT8, 6, 5, 4)
    codes     = round(y * scale)            to nearest, ties to even; or stochastically
    scale_inv = amax / Qmax                 what decode multiplies by

    decode:   b' = H_G (codes * scale_inv)

H_G H_G = G I and G is a power of two, so dividing by G once and exactly replaces the two divisions by sqrt(G) of the
orthonormal form, and no finite input overflows on the way.

``"dual"`` is the TACO paper's adaptive scale-Hadamard with dual scale (arXiv 2604.24088, section 4): ``b`` is first
multiplied by ``alpha = clamp(Qmax / sqrt(mean(b^2) + 1e-6), 1e-3, 1e3)``, which travels too and is divided out.
We differ from the paper where it clamps the second scale to 1e6 from above, which would cut off values near 1e30,
and where its release turns NaN and Inf into zeros.

A block with a NaN or an Inf gets ``scale_inv = NaN``, so that all of it decodes to NaN; a block whose rotated values
are all below 2^-110 gets zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_taco.codec.elements import CODE_MAX
from lightning_taco.codec.layout import MessageLayout
from lightning_taco.codec.rounding import codes_to_values, pack, round_to_codes, unpack
from lightning_taco.config import BITS_PER_CODE, CodecConfig

SMALLEST_AMAX = 2.0**-110
ALPHA_EPSILON = 1e-6
ALPHA_MIN, ALPHA_MAX = 1e-3, 1e3


def hadamard_transform_reference(blocks: Tensor) -> Tensor:
    """Multiply the last dim by the unnormalised Sylvester Hadamard matrix: adjacent pairs first, then pairs of pairs.

    Args:
        blocks: fp32, ``[..., G]``, G a power of two.
    """
    block_size = blocks.shape[-1]
    half = 1
    while half < block_size:
        pairs = blocks.unflatten(-1, (-1, 2, half))
        left, right = pairs[..., 0, :], pairs[..., 1, :]
        blocks = torch.stack((left + right, left - right), dim=-2).flatten(-3)
        half *= 2
    return blocks


def encode_reference(values: Tensor, codec: CodecConfig, *, seed: int = 0) -> Tensor:
    """Encode each row of `values`.

    Args:
        values: bf16, fp16 or fp32, ``[R, N]``.
        codec: with its element resolved.
        seed: of stochastic rounding, from 0 to 2^62 - 1.

    Returns:
        ``uint8 [R, message_bytes]``.
    """
    num_rows, num_values = values.shape
    layout = MessageLayout.of(num_values, codec)
    padded = torch.zeros(num_rows, layout.num_blocks * codec.block_size, dtype=torch.float32, device=values.device)
    padded[:, :num_values] = values
    blocks = padded.view(num_rows, layout.num_blocks, codec.block_size)
    alpha = None
    if codec.scale_mode == "dual":
        alpha = _alpha(_pairwise_sum(blocks * blocks) / codec.block_size, CODE_MAX[codec.element])
        blocks = blocks * alpha
    if codec.rotation:
        blocks = hadamard_transform_reference(blocks * (1.0 / codec.block_size))
    return _message(blocks, alpha, layout, codec, seed)


def decode_reference(messages: Tensor, codec: CodecConfig, num_values: int, dtype: torch.dtype) -> Tensor:
    """Decode each row of `messages`, ``uint8 [R, message_bytes]``, to ``[R, num_values]`` of `dtype`."""
    blocks = _decode_rotated(messages, codec, num_values)
    return _leave_rotated_domain(blocks, codec, num_values).to(dtype)


def decode_sum_reference(
    messages: Tensor, codec: CodecConfig, num_values: int, dtype: torch.dtype, *, average: bool = False
) -> Tensor:
    """Sum the decoded rows of `messages`, ``uint8 [S, message_bytes]``, in row order; ``[num_values]`` of `dtype`."""
    total = _sum_rotated(messages, codec, num_values, average)
    return _leave_rotated_domain(total, codec, num_values).to(dtype)[0]


def requantize_reference(
    messages: Tensor, codec: CodecConfig, num_values: int, *, average: bool = False, seed: int = 0
) -> Tensor:
    """The message of the sum of `messages`: decode, add and quantise again without leaving the rotated domain.

    Args:
        messages: ``uint8 [S, message_bytes]``, one a source rank.
        codec: with its element resolved.
        num_values: values in one message.
        average: divide the sum by S.

    Returns:
        ``uint8 [1, message_bytes]``.
    """
    total = _sum_rotated(messages, codec, num_values, average)
    layout = MessageLayout.of(num_values, codec)
    alpha = None
    if codec.scale_mode == "dual":
        # The energy of b is that of y = H b / G times G^2 / G, so its mean is the sum of y^2.
        alpha = _alpha(_pairwise_sum(total * total), CODE_MAX[codec.element])
        total = total * alpha
    return _message(total, alpha, layout, codec, seed)


def _alpha(mean_energy: Tensor, code_max: float) -> Tensor:
    # Through float64, since torch's vectorised fp32 square root on CPU is not always the nearest fp32.
    root = (mean_energy + ALPHA_EPSILON).double().sqrt().float()
    return _divide(code_max, root).clamp(ALPHA_MIN, ALPHA_MAX)


def _divide(numerator: float, denominator: Tensor) -> Tensor:
    """One IEEE division. With a number on either side torch may multiply by a reciprocal, which rounds twice."""
    return torch.full_like(denominator, numerator) / denominator


def _pairwise_sum(blocks: Tensor) -> Tensor:
    """Sum over the last dim, kept: neighbours first, in an order that a kernel can repeat."""
    while blocks.shape[-1] > 1:
        pairs = blocks.unflatten(-1, (-1, 2))
        blocks = pairs[..., 0] + pairs[..., 1]
    return blocks


def _message(blocks: Tensor, alpha: Tensor | None, layout: MessageLayout, codec: CodecConfig, seed: int) -> Tensor:
    code_max = CODE_MAX[codec.element]
    amax = blocks.abs().amax(dim=-1, keepdim=True)
    finite = torch.isfinite(amax)
    usable = finite & (amax >= SMALLEST_AMAX)
    scale = torch.where(usable, _divide(code_max, amax), 0.0)
    scale_inv = torch.where(finite, torch.where(usable, amax / torch.full_like(amax, code_max), 0.0), torch.nan)
    quantized = torch.where(usable, blocks * scale, 0.0)
    messages = torch.zeros(blocks.shape[0], layout.message_bytes, dtype=torch.uint8, device=blocks.device)
    planes = pack(round_to_codes(quantized, codec, seed), codec)
    messages[:, : planes.shape[1]] = planes
    _scales(messages, layout.scale_offset_bytes, layout).copy_(scale_inv.squeeze(-1))
    if alpha is not None:
        _scales(messages, layout.alpha_offset_bytes, layout).copy_(torch.where(finite, alpha, 1.0).squeeze(-1))
    return messages


def _scales(messages: Tensor, offset_bytes: int, layout: MessageLayout) -> Tensor:
    """The fp32 ``[R, num_blocks]`` that start at `offset_bytes` of each message, as a view."""
    start = offset_bytes // 4
    if layout.num_blocks == 0:  # no values: an empty row cannot be viewed as another dtype
        return torch.empty(messages.shape[0], 0, device=messages.device)
    return messages.view(torch.float32)[:, start : start + layout.num_blocks]


def _decode_rotated(messages: Tensor, codec: CodecConfig, num_values: int) -> Tensor:
    layout = MessageLayout.of(num_values, codec)
    planes = messages[:, : layout.num_blocks * codec.block_size * BITS_PER_CODE[codec.element] // 8].contiguous()
    codes = codes_to_values(unpack(planes, codec, layout.num_blocks), codec)
    scale_inv = _scales(messages, layout.scale_offset_bytes, layout)
    if codec.scale_mode == "dual":
        scale_inv = scale_inv / _scales(messages, layout.alpha_offset_bytes, layout)
    return codes * scale_inv.unsqueeze(-1)


def _sum_rotated(messages: Tensor, codec: CodecConfig, num_values: int, average: bool) -> Tensor:
    decoded = _decode_rotated(messages, codec, num_values)
    total = decoded[0:1]
    for source in range(1, messages.shape[0]):
        total = total + decoded[source : source + 1]
    return total * (1.0 / messages.shape[0]) if average else total


def _leave_rotated_domain(blocks: Tensor, codec: CodecConfig, num_values: int) -> Tensor:
    if codec.rotation:
        blocks = hadamard_transform_reference(blocks)
    return blocks.flatten(1)[:, :num_values]
