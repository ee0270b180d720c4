"""Scales of the codec's kernels: of a block for its quantisation, and those that come before, by energy.

Functions of Triton only, on tiles held in parts as in `codec.kernels`; `codec.reference` is their oracle.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lightning_taco.codec.kernels_numbers import scaled, spread, sum_of_squares
from lightning_taco.codec.reference import (
    ALPHA_EPSILON,
    ALPHA_MAX,
    ALPHA_MIN,
    FINE_HIGHEST,
    FINE_LOWEST,
    SMALLEST_AMAX,
    SMALLEST_EXPONENT,
)
from lightning_taco.config import SUB_BLOCK_SIZE

_SMALLEST_AMAX = tl.constexpr(SMALLEST_AMAX)
_ALPHA_EPSILON = tl.constexpr(ALPHA_EPSILON)
_ALPHA_MIN = tl.constexpr(ALPHA_MIN)
_ALPHA_MAX = tl.constexpr(ALPHA_MAX)
_ABS_MASK = tl.constexpr(0x7FFFFFFF)
_INF_BITS = tl.constexpr(0x7F800000)
_FINE_LOWEST, _FINE_HIGHEST = tl.constexpr(FINE_LOWEST), tl.constexpr(FINE_HIGHEST)
_SMALLEST_EXPONENT = tl.constexpr(SMALLEST_EXPONENT)
_SUB_BLOCK = tl.constexpr(SUB_BLOCK_SIZE)


@triton.jit
def energy_scale(mean_energy, C: tl.constexpr):
    """What a block is multiplied by first in dual mode, in the shape of its mean square."""
    alpha = tl.div_rn(tl.full(mean_energy.shape, C.code_max, tl.float32), tl.sqrt_rn(mean_energy + _ALPHA_EPSILON))
    return tl.minimum(tl.maximum(alpha, _ALPHA_MIN), _ALPHA_MAX)


@triton.jit
def largest_bits(parts, C: tl.constexpr):
    """The largest magnitude of each block, as bits: they order like the floats, NaN and Inf above all. int32 [tile]."""
    PARTS: tl.constexpr = C.parts
    largest = tl.abs(parts[0])
    for part in tl.static_range(1, PARTS):
        largest = tl.maximum(largest, tl.abs(parts[part]), propagate_nan=tl.PropagateNan.ALL)
    return tl.max(largest.to(tl.int32, bitcast=True) & _ABS_MASK, axis=1)


@triton.jit
def equalize(parts, C: tl.constexpr):
    """Parts with sub-blocks of one energy; the bits of their factors, a tuple of int32 [tile, 1]; exponents [tile]."""
    SUB_BLOCKS: tl.constexpr = C.block_size // _SUB_BLOCK
    PARTS_PER_SUB_BLOCK: tl.constexpr = _SUB_BLOCK // C.width
    exponent = tl.minimum(largest_bits(parts, C) >> 23, 253)
    parts = scaled(parts, ((254 - exponent) << 23).to(tl.float32, bitcast=True)[:, None], C)
    usable = (exponent >= _SMALLEST_EXPONENT)[:, None]
    equalized, factor_bits = (), ()
    for sub_block in tl.static_range(SUB_BLOCKS):
        energy = sum_of_squares(parts, sub_block * PARTS_PER_SUB_BLOCK, PARTS_PER_SUB_BLOCK, C)
        root = tl.sqrt_rn(energy * (1.0 / _SUB_BLOCK))
        bits = (root.to(tl.int32, bitcast=True) & _ABS_MASK) >> 20
        bits = tl.minimum(tl.maximum(bits, _FINE_LOWEST), _FINE_HIGHEST - 1)
        factor = (bits << 20).to(tl.float32, bitcast=True)
        inverse = spread(tl.div_rn(tl.full(factor.shape, 1.0, tl.float32), factor), C)
        for part in tl.static_range(PARTS_PER_SUB_BLOCK):
            values = parts[sub_block * PARTS_PER_SUB_BLOCK + part] * inverse
            equalized = equalized + (tl.where(usable, values, 0.0),)
        factor_bits = factor_bits + (tl.reshape(bits, (C.tile, 1)),)
    return equalized, factor_bits, exponent


@triton.jit
def _largest_bits_of_each_sign(parts, C: tl.constexpr):
    """The largest positive and the largest negative magnitude of each block, as bits [tile]; 0 where there is none."""
    PARTS: tl.constexpr = C.parts
    bits = parts[0].to(tl.int32, bitcast=True)
    highest = bits ^ ((bits >> 31) & _ABS_MASK)  # orders like the floats
    lowest = highest
    for part in tl.static_range(1, PARTS):
        bits = parts[part].to(tl.int32, bitcast=True)
        ordered = bits ^ ((bits >> 31) & _ABS_MASK)
        highest, lowest = tl.maximum(highest, ordered), tl.minimum(lowest, ordered)
    positive = tl.maximum(tl.max(highest, axis=1), 0)
    negative = tl.minimum(tl.min(lowest, axis=1), -1)  # -1 is minus zero
    return positive, (negative ^ _ABS_MASK) & _ABS_MASK


@triton.jit
def _gaussian_scale_and_inverse(positive, negative, C: tl.constexpr):
    """What multiplies values to quantise, and back, from the largest of each sign; one of them is not 0."""
    larger, smaller = tl.maximum(positive, negative), tl.minimum(positive, negative)
    half = tl.full([C.tile], C.gaussian_half, tl.float32)
    top = tl.full([C.tile], C.gaussian_top, tl.float32)
    sign = tl.where(positive > negative, -1.0, 1.0)
    other_scale = tl.where(smaller > 0, tl.div_rn(top, tl.where(smaller > 0, smaller, 1.0)), float("inf"))
    scale = tl.minimum(tl.div_rn(half, larger), other_scale) * sign
    return scale, tl.maximum(tl.div_rn(larger, half), tl.div_rn(smaller, top)) * sign


@triton.jit
def block_scales(parts, C: tl.constexpr):
    """What multiplies to quantise, what multiplies to recover, is it finite, is it not all zero."""
    if C.is_gaussian:
        positive_bits, negative_bits = _largest_bits_of_each_sign(parts, C)
        amax_bits = tl.maximum(positive_bits, negative_bits)
    else:
        amax_bits = largest_bits(parts, C)
    finite = amax_bits < _INF_BITS
    amax = amax_bits.to(tl.float32, bitcast=True)
    usable = finite & (amax >= _SMALLEST_AMAX)
    if C.is_gaussian:
        positive = tl.where(usable, positive_bits.to(tl.float32, bitcast=True), 1.0)
        negative = tl.where(usable, negative_bits.to(tl.float32, bitcast=True), 1.0)
        scale, scale_inv = _gaussian_scale_and_inverse(positive, negative, C)
    else:
        code_max = tl.full([C.tile], C.code_max, tl.float32)
        amax = tl.where(usable, amax, 1.0)
        scale, scale_inv = tl.div_rn(code_max, amax), tl.div_rn(amax, code_max)
    scale_inv = tl.where(finite, tl.where(usable, scale_inv, 0.0), float("nan"))
    return scale, scale_inv, finite, usable
