"""The oracle: the codec in plain torch, written to be read.

All functions work on any device. The Triton kernels produce the same bits: every rounding step is spelled out, sums run
in the same order, and nothing is fused.

Per block ``b`` of G values, in fp32:

    y         = H_G b / G                   H_G the Sylvester Hadamard matrix; y = b without rotation
    amax      = max |y|
    scale     = Qmax / amax                 Qmax = 448 (E4M3), 57344 (E5M2), 127, 31, 15, 7 or 3 (INT8, 6, 5, 4, 3),
                                            6 (FP4: E2M1), 1 (NF4: the nearest of a table's 16 levels)
    codes     = round(y * scale)            to nearest, ties to even; or stochastically
    scale_inv = amax / Qmax                 what decode multiplies by

    decode:   b' = H_G (codes * scale_inv)

H_G H_G = G I and G is a power of two, so dividing by G once and exactly replaces the two divisions by sqrt(G) of the
orthonormal form, and no finite input overflows on the way.

``"dual"`` is the TACO paper's adaptive scale-Hadamard with dual scale (arXiv 2604.24088, section 4): ``b`` is first
multiplied by ``alpha = clamp(Qmax / sqrt(mean(b^2) + 1e-6), 1e-3, 1e3)``, which travels too and is divided out.
We differ from the paper where it clamps the second scale to 1e6 from above, which would cut off values near 1e30,
and where its release turns NaN and Inf into zeros.

``"fine"`` brings the sub-blocks of 32 values of a block to one energy before the rotation: sub-block j is divided by
f_j, its root mean square over the block's own power of two, cut to three bits of mantissa; f_j travels as one byte, the
power of two in ``scale_inv``. What decode gets wrong in a sub-block is then in proportion to that sub-block, not to the
block. The paper's own first scale is one for the whole block and cancels. Sums leave the rotated domain, as ranks have
other f_j.

``levels="gaussian"`` puts the 2^b codes of b bits where `codec.elements` says, and ``scale_inv`` carries a sign: the
side on which the block's largest value lies gets the one code more that two's complement has. Turned to that side,

    scale_inv = max(largest / h, largest on the other side / top)      h = 2^(b-1), top the level of code h - 1

so that nothing is clipped, and stochastic rounding stays without bias.

A block with a NaN or an Inf gets ``scale_inv = NaN``, so that all of it decodes to NaN; a block whose rotated values
are all below 2^-110 gets zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_taco.codec.elements import CODE_MAX, gaussian_half, gaussian_top
from lightning_taco.codec.layout import MessageLayout
from lightning_taco.codec.rounding import codes_to_values, pack, round_to_codes, unpack
from lightning_taco.config import BITS_PER_CODE, SUB_BLOCK_SIZE, CodecConfig

SMALLEST_AMAX = 2.0**-110
ALPHA_EPSILON = 1e-6
ALPHA_MIN, ALPHA_MAX = 1e-3, 1e3
FINE_LOWEST, FINE_HIGHEST = (127 - 20) << 3, (127 + 3) << 3
"""Bounds of an f_j's exponent and first three bits of mantissa: from 2^-20, which a sub-block of zeros gets, to 8."""
SMALLEST_EXPONENT = 127 - 110


Numbering = tuple[int, int, int | None]
"""Seed, first block and blocks from row to row, as `rounding.random_bits` has them."""


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


def encode_reference(
    values: Tensor, codec: CodecConfig, *, seed: int = 0, first_block: int = 0, row_blocks: int | None = None
) -> Tensor:
    """Encode each row of `values`.

    Args:
        values: bf16, fp16 or fp32, ``[R, N]``.
        codec: with its element resolved.
        seed: of stochastic rounding, from 0 to 2^62 - 1.
        first_block: as for `encode`.
        row_blocks: as for `encode`.

    Returns:
        ``uint8 [R, message_bytes]``.
    """
    numbering = (seed, first_block, row_blocks)
    num_rows, num_values = values.shape
    layout = MessageLayout.of(num_values, codec)
    padded = torch.zeros(num_rows, layout.num_blocks * codec.block_size, dtype=torch.float32, device=values.device)
    padded[:, :num_values] = values
    blocks = padded.view(num_rows, layout.num_blocks, codec.block_size)
    return _encode_blocks(blocks, layout, codec, numbering)


def _encode_blocks(blocks: Tensor, layout: MessageLayout, codec: CodecConfig, numbering: Numbering) -> Tensor:
    if codec.scale_mode == "fine":
        return _encode_fine(blocks, layout, codec, numbering)
    alpha, factor = None, 1.0 / codec.block_size if codec.rotation else 1.0
    if codec.scale_mode == "dual":
        alpha = _alpha(_pairwise_sum(blocks * blocks) / codec.block_size, CODE_MAX[codec.element])
        blocks = blocks * (alpha * factor)
    else:
        blocks = blocks * factor
    if codec.rotation:
        blocks = hadamard_transform_reference(blocks)
    return _message(blocks, alpha, layout, codec, numbering)


def _encode_fine(blocks: Tensor, layout: MessageLayout, codec: CodecConfig, numbering: Numbering) -> Tensor:
    equalized, factors, power = _equalize(blocks)
    rotated = hadamard_transform_reference(equalized * (1.0 / codec.block_size))
    messages = _message(rotated, None, layout, codec, numbering)
    scales = _scales(messages, layout.scale_offset_bytes, layout)
    scales.copy_(scales * power.squeeze(-1))
    _fine_factors(messages, layout, codec).copy_(factors)
    return messages


def decode_reference(messages: Tensor, codec: CodecConfig, num_values: int, dtype: torch.dtype) -> Tensor:
    """Decode each row of `messages`, ``uint8 [R, message_bytes]``, to ``[R, num_values]`` of `dtype`."""
    blocks = _decode_to_sum_domain(messages, codec, num_values)
    return _leave_rotated_domain(blocks, codec, num_values).to(dtype)


def decode_sum_reference(
    messages: Tensor,
    codec: CodecConfig,
    num_values: int,
    dtype: torch.dtype,
    *,
    average: bool = False,
    factor: float | None = None,
) -> Tensor:
    """Sum the decoded rows of `messages`, ``uint8 [S, message_bytes]``, in row order; ``[num_values]`` of `dtype`."""
    total = _sum(messages, codec, num_values, 1.0 / messages.shape[0] if average else factor)
    return _leave_rotated_domain(total, codec, num_values).to(dtype)[0]


def requantize_reference(
    messages: Tensor,
    codec: CodecConfig,
    num_values: int,
    *,
    average: bool = False,
    seed: int = 0,
    first_block: int = 0,
) -> Tensor:
    """The message of the sum of `messages`: decode, add and quantise again; rotated throughout, but for fine scales.

    Args:
        messages: ``uint8 [S, message_bytes]``, one a source rank.
        codec: with its element resolved.
        num_values: values in one message.
        average: divide the sum by S.
        seed: of stochastic rounding.
        first_block: as for `encode`.

    Returns:
        ``uint8 [1, message_bytes]``.
    """
    numbering = (seed, first_block, None)
    total = _sum(messages, codec, num_values, 1.0 / messages.shape[0] if average else None)
    layout = MessageLayout.of(num_values, codec)
    if codec.scale_mode == "fine":
        return _encode_fine(total, layout, codec, numbering)
    alpha = None
    if codec.scale_mode == "dual":
        # The energy of b is that of y = H b / G times G^2 / G, so its mean is the sum of y^2.
        alpha = _alpha(_pairwise_sum(total * total), CODE_MAX[codec.element])
        total = total * alpha
    return _message(total, alpha, layout, codec, numbering)


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


def _equalize(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Blocks whose sub-blocks have a root mean square of 1 to 1.125; the bytes of their f_j; the blocks' powers of two.

    Returns:
        fp32 ``[R, num_blocks, block]``, ``uint8 [R, num_blocks, sub-blocks]``, fp32 ``[R, num_blocks, 1]``.
    """
    exponent = (blocks.abs().amax(dim=-1, keepdim=True).view(torch.int32) >> 23).clamp(max=253)
    # By the block's own power of two first, so that no square overflows or vanishes.
    sub_blocks = (blocks * _power_of_two(254 - exponent)).unflatten(-1, (-1, SUB_BLOCK_SIZE))
    energy = _pairwise_sum(sub_blocks * sub_blocks) * (1.0 / SUB_BLOCK_SIZE)
    bits = (energy.double().sqrt().float().view(torch.int32) & 0x7FFFFFFF) >> 20
    bits = bits.clamp(FINE_LOWEST, FINE_HIGHEST - 1)
    factors = (bits << 20).view(torch.float32)
    is_usable = exponent >= SMALLEST_EXPONENT
    equalized = torch.where(is_usable, (sub_blocks * _divide(1.0, factors)).flatten(-2), 0.0)
    return equalized, (bits - FINE_LOWEST).squeeze(-1).to(torch.uint8), _power_of_two(exponent)


def _power_of_two(biased_exponent: Tensor) -> Tensor:
    """fp32 2^(biased_exponent - 127)."""
    return (biased_exponent.to(torch.int32) << 23).view(torch.float32)


def _message(
    blocks: Tensor, alpha: Tensor | None, layout: MessageLayout, codec: CodecConfig, numbering: Numbering
) -> Tensor:
    amax = blocks.abs().amax(dim=-1, keepdim=True)
    finite = torch.isfinite(amax)
    usable = finite & (amax >= SMALLEST_AMAX)
    scale, scale_inv = _scale_and_inverse(blocks, amax, codec)
    scale_inv = torch.where(finite, torch.where(usable, scale_inv, 0.0), torch.nan)
    quantized = torch.where(usable, blocks * torch.where(usable, scale, 0.0), 0.0)
    messages = torch.zeros(blocks.shape[0], layout.message_bytes, dtype=torch.uint8, device=blocks.device)
    planes = pack(round_to_codes(quantized, codec, *numbering), codec)
    messages[:, : planes.shape[1]] = planes
    _scales(messages, layout.scale_offset_bytes, layout).copy_(scale_inv.squeeze(-1))
    if alpha is not None:
        _scales(messages, layout.alpha_offset_bytes, layout).copy_(torch.where(finite, alpha, 1.0).squeeze(-1))
    return messages


def _scale_and_inverse(blocks: Tensor, amax: Tensor, codec: CodecConfig) -> tuple[Tensor, Tensor]:
    code_max = CODE_MAX[codec.element]
    if codec.levels == "uniform":
        return _divide(code_max, amax), amax / torch.full_like(amax, code_max)
    bits = BITS_PER_CODE[codec.element]
    half, top = float(gaussian_half(bits)), gaussian_top(bits)
    positive = blocks.amax(dim=-1, keepdim=True).clamp(min=0.0)
    negative = (-blocks).amax(dim=-1, keepdim=True).clamp(min=0.0)
    larger, smaller = torch.maximum(positive, negative), torch.minimum(positive, negative)
    sign = torch.where(positive > negative, -1.0, 1.0)
    # A zero is left out, since it may be a negative one.
    scale = torch.minimum(_divide(half, larger), torch.where(smaller > 0, _divide(top, smaller), torch.inf))
    scale_inv = torch.maximum(larger / torch.full_like(larger, half), smaller / torch.full_like(smaller, top))
    return scale * sign, scale_inv * sign


def _scales(messages: Tensor, offset_bytes: int, layout: MessageLayout) -> Tensor:
    """The fp32 ``[R, num_blocks]`` that start at `offset_bytes` of each message, as a view."""
    start = offset_bytes // 4
    if layout.num_blocks == 0:  # no values: an empty row cannot be viewed as another dtype
        return torch.empty(messages.shape[0], 0, device=messages.device)
    return messages.view(torch.float32)[:, start : start + layout.num_blocks]


def _fine_factors(messages: Tensor, layout: MessageLayout, codec: CodecConfig) -> Tensor:
    """The bytes ``[R, num_blocks, sub-blocks]`` of each message's fine scales, as a view."""
    per_block = codec.block_size // SUB_BLOCK_SIZE
    start = layout.alpha_offset_bytes
    return messages[:, start : start + layout.num_blocks * per_block].unflatten(1, (layout.num_blocks, per_block))


def _decode_to_sum_domain(messages: Tensor, codec: CodecConfig, num_values: int) -> Tensor:
    """fp32 ``[R, num_blocks, block]`` as they may be added: still rotated, or at their place if scales are fine."""
    layout = MessageLayout.of(num_values, codec)
    planes = messages[:, : layout.num_blocks * codec.block_size * BITS_PER_CODE[codec.element] // 8].contiguous()
    codes = codes_to_values(unpack(planes, codec, layout.num_blocks), codec)
    scale_inv = _scales(messages, layout.scale_offset_bytes, layout)
    if codec.scale_mode == "dual":
        scale_inv = scale_inv / _scales(messages, layout.alpha_offset_bytes, layout)
    blocks = codes * scale_inv.unsqueeze(-1)
    if codec.scale_mode == "fine":
        bits = _fine_factors(messages, layout, codec).to(torch.int32) + FINE_LOWEST
        factors = (bits << 20).view(torch.float32).unsqueeze(-1)
        sub_blocks = hadamard_transform_reference(blocks).unflatten(-1, (-1, SUB_BLOCK_SIZE))
        blocks = (sub_blocks * factors).flatten(-2)
    return blocks


def _sum(messages: Tensor, codec: CodecConfig, num_values: int, factor: float | None) -> Tensor:
    decoded = _decode_to_sum_domain(messages, codec, num_values)
    total = decoded[0:1]
    for source in range(1, messages.shape[0]):
        total = total + decoded[source : source + 1]
    return total if factor is None else total * factor


def _leave_rotated_domain(blocks: Tensor, codec: CodecConfig, num_values: int) -> Tensor:
    if codec.rotation and codec.scale_mode != "fine":
        blocks = hadamard_transform_reference(blocks)
    return blocks.flatten(1)[:, :num_values]
