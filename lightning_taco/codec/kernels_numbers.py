"""What the codec's kernels do to numbers: the rotation, random bits, and one code a value.

Functions of Triton only, called by `codec.kernels`; `codec.reference` and `codec.rounding` are their oracles.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lightning_taco.codec.elements import (
    GAUSSIAN_CENTRE,
    GAUSSIAN_EDGE,
    GAUSSIAN_INVERSE,
    MIX_FACTORS,
    MIX_SHIFTS,
    NF4_LEVELS,
    NF4_MIDPOINTS,
    PLACE_FACTOR,
)
from lightning_taco.codec.kernels_native import e4m3_word_to_floats, floats_to_fp8_word
from lightning_taco.codec.kernels_planes import by_fours, from_fours, packed, top_bits, unpacked

_ABS_MASK = tl.constexpr(0x7FFFFFFF)
_SIGN_MASK = tl.constexpr(-(1 << 31))
_INF_BITS = tl.constexpr(0x7F800000)
# Adding 1.5 * 2^23 rounds a small fp32 to an integer, ties to even, and leaves it in the low bits.
_ROUND_MAGIC = tl.constexpr(12582912.0)
_ROUND_MAGIC_BITS = tl.constexpr(0x4B400000)
_MIX_SHIFT_0, _MIX_SHIFT_1, _MIX_SHIFT_2 = (tl.constexpr(shift) for shift in MIX_SHIFTS)
_MIX_FACTOR_0, _MIX_FACTOR_1 = (tl.constexpr(factor) for factor in MIX_FACTORS)
_TWO_POW_23, _TWO_POW_23_BITS = tl.constexpr(2.0**23), tl.constexpr(0x4B000000)
_ONE_BITS = tl.constexpr(0x3F800000)
_HALF_STEP_MINUS_ONE = tl.constexpr(2.0**-17 - 1.0)
_PLACE_FACTOR = tl.constexpr(PLACE_FACTOR)
_CENTRE, _EDGE = tl.constexpr(GAUSSIAN_CENTRE), tl.constexpr(GAUSSIAN_EDGE)
_INVERSE_0, _INVERSE_1, _INVERSE_2, _INVERSE_3 = (tl.constexpr(factor) for factor in GAUSSIAN_INVERSE)


@triton.jit
def _butterfly(values, DISTANCE: tl.constexpr, C: tl.constexpr, FACTOR: tl.constexpr):
    """[tile, width] -> FACTOR times sums and differences of the values that lie DISTANCE apart, each in its place."""
    pairs = tl.reshape(values, (C.tile, C.width // (2 * DISTANCE), 2, DISTANCE))
    if C.lane_values > DISTANCE:
        left, right = tl.split(tl.permute(pairs, (0, 1, 3, 2)))
        if FACTOR == 1.0:
            total, difference = left + right, left - right
        else:
            right = right * FACTOR
            factor = tl.full(left.shape, FACTOR, tl.float32)
            total, difference = tl.fma(left, factor, right), tl.fma(left, factor, -right)
        pairs = tl.permute(tl.join(total, difference), (0, 1, 3, 2))
    else:
        # The other value of a pair is with another thread. Its bits are the sum of both less one's own: the compiler
        # makes one exchange between two lanes of that, where parting and joining would go through shared memory.
        bits = pairs.to(tl.int32, bitcast=True)
        other = (tl.sum(bits, axis=2, keep_dims=True) - bits).to(tl.float32, bitcast=True)
        sign = (1 - 2 * tl.arange(0, 2)).to(tl.float32)[None, None, :, None]
        pairs = tl.fma(pairs, tl.broadcast_to(sign, pairs.shape), other)
    return tl.reshape(pairs, (C.tile, C.width))


@triton.jit
def hadamard(parts, C: tl.constexpr, FACTOR: tl.constexpr = 1.0):
    """Parts of [tile, width] times FACTOR -> the same times the unnormalised Hadamard matrix: adjacent pairs first.

    FACTOR is a power of two, and times it each value is still exact: then one product is saved for every two values.

    Pairs of values that one thread reads at once lie in it, and so do those of two parts.
    """
    PARTS: tl.constexpr = C.parts
    LOG2_PARTS: tl.constexpr = C.log2_parts
    LOG2_WIDTH: tl.constexpr = C.log2_width
    inner = ()
    for part in tl.static_range(PARTS):
        values = parts[part]
        for stage in tl.static_range(LOG2_WIDTH):
            values = _butterfly(values, 1 << stage, C, FACTOR if stage == 0 else 1.0)
        inner = inner + (values,)
    for stage in tl.static_range(LOG2_PARTS):
        outer = ()
        for part in tl.static_range(PARTS):
            if part & (1 << stage):
                outer = outer + (inner[part ^ (1 << stage)] - inner[part],)
            else:
                outer = outer + (inner[part] + inner[part ^ (1 << stage)],)
        inner = outer
    return inner


@triton.jit
def rotated(parts, kind: tl.constexpr, C: tl.constexpr):
    """Parts of values that came as `kind` -> the same in the domain that is quantised."""
    if C.is_rotated:
        if kind == tl.float32:
            parts = hadamard(scaled(parts, 1.0 / C.block_size, C), C)
        else:
            # Of 8 or 11 significant bits: exact, however small.
            parts = hadamard(parts, C, 1.0 / C.block_size)
    return parts


@triton.jit
def scaled(parts, factor, C: tl.constexpr):
    """Each part times `factor`."""
    PARTS: tl.constexpr = C.parts
    result = ()
    for part in tl.static_range(PARTS):
        result = result + (parts[part] * factor,)
    return result


@triton.jit
def added(parts, others, C: tl.constexpr):
    """Each part plus the other of its place."""
    PARTS: tl.constexpr = C.parts
    result = ()
    for part in tl.static_range(PARTS):
        result = result + (parts[part] + others[part],)
    return result


@triton.jit
def sum_of_squares(parts, FIRST: tl.constexpr, COUNT: tl.constexpr, C: tl.constexpr):
    """The squares of COUNT parts from FIRST on, neighbours added first: one value of each block, to be `spread`."""
    LOG2_PARTS: tl.constexpr = C.log2_parts
    LOG2_WIDTH: tl.constexpr = C.log2_width
    sums = ()
    for part in tl.static_range(FIRST, FIRST + COUNT):
        values = tl.reshape(parts[part] * parts[part], C.halvings)
        for stage in tl.static_range(LOG2_WIDTH):
            values = tl.sum(values, axis=LOG2_WIDTH - stage, keep_dims=True)
        sums = sums + (values,)
    for stage in tl.static_range(LOG2_PARTS):
        pairs = ()
        for pair in tl.static_range(COUNT >> (stage + 1)):
            pairs = pairs + (sums[2 * pair] + sums[2 * pair + 1],)
        if (COUNT >> (stage + 1)) > 0:
            sums = pairs
    return sums[0]


@triton.jit
def spread(value, C: tl.constexpr):
    """What there is one of for each block, as `sum_of_squares` gives it -> [tile, width], where a part's values are.

    Threads keep what they have; broadcasting a [tile, 1] instead lets the compiler move all parts to where that lies.
    """
    return tl.reshape(tl.broadcast_to(value, C.halvings), (C.tile, C.width))


@triton.jit
def _mix(bits):
    bits = bits ^ (bits >> _MIX_SHIFT_0)
    bits = bits * _MIX_FACTOR_0
    bits = bits ^ (bits >> _MIX_SHIFT_1)
    bits = bits * _MIX_FACTOR_1
    return bits ^ (bits >> _MIX_SHIFT_2)


@triton.jit
def random_key(blocks, seed_low, seed_high):
    """What the random numbers of each block are made of, uint32 [tile]."""
    low, high = (blocks & 0xFFFFFFFF).to(tl.uint32), (blocks >> 32).to(tl.uint32)
    return _mix(_mix(low ^ tl.cast(seed_low, tl.uint32)) + high + tl.cast(seed_high, tl.uint32))


@triton.jit
def random_pair(key, PART: tl.constexpr, C: tl.constexpr):
    """16 random bits for each value of PART and of the part half a block behind it, int32 [tile, width] each.

    A function of position and seed only: two values half a block apart share the 32 bits of one hash.
    """
    places = (PART * C.width + tl.arange(0, C.width)).to(tl.uint32) * _PLACE_FACTOR
    bits = _mix(key[:, None] + places[None, :])
    return (bits & 0xFFFF).to(tl.int32), (bits >> 16).to(tl.int32)


@triton.jit
def uniform_numbers(noise):
    """16 random bits -> fp32 from 0 to 1, the middles of 2^16 steps."""
    return ((noise << 7) | _ONE_BITS).to(tl.float32, bitcast=True) + _HALF_STEP_MINUS_ONE


@triton.jit
def round_to_integer(values):
    """Small fp32 -> int32, ties to even."""
    return (values + _ROUND_MAGIC).to(tl.int32, bitcast=True) - _ROUND_MAGIC_BITS


@triton.jit
def _low_bits_of_integer(values):
    """Small fp32 -> int32 whose low bits are those of the nearest integer, ties to even; the high ones say nothing."""
    return (values + _ROUND_MAGIC).to(tl.int32, bitcast=True)


@triton.jit
def _low_bits_within(values, LOWEST: tl.constexpr, HIGHEST: tl.constexpr):
    """The same, of the nearest integer from LOWEST to HIGHEST."""
    rounded = values + _ROUND_MAGIC
    return tl.minimum(tl.maximum(rounded, _ROUND_MAGIC + LOWEST), _ROUND_MAGIC + HIGHEST).to(tl.int32, bitcast=True)


@triton.jit
def _float_code(
    quantized,
    noise,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    LARGEST: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    BITS: tl.constexpr = 8,
):
    """fp32 within the format's range -> bits of a narrow float, exactly: where a cast is not."""
    DROPPED: tl.constexpr = 23 - MANTISSA
    bits = quantized.to(tl.int32, bitcast=True)
    if STOCHASTIC:
        magnitude = bits & _ABS_MASK
        rounding = ((noise << 1) | 1) << (DROPPED - 17)
        normal = ((magnitude + rounding) >> DROPPED) - ((127 - BIAS) << MANTISSA)
        steps = magnitude.to(tl.float32, bitcast=True) * (2.0 ** (BIAS + MANTISSA - 1)) + (uniform_numbers(noise) - 0.5)
        code = tl.where(magnitude < ((128 - BIAS) << 23), round_to_integer(steps), normal)
        code = tl.minimum(code, LARGEST)
    else:
        # A number so large that fp32 beside it has the format's steps rounds, ties to even; most of what follows runs
        # beside the integer units, which are what encoding waits for.
        magnitude = tl.abs(quantized)
        lowest = tl.maximum(magnitude, 2.0 ** (1 - BIAS))
        power = (lowest.to(tl.int32, bitcast=True) & _INF_BITS).to(tl.float32, bitcast=True)
        large = power * (1.5 * 2.0**DROPPED)
        rounded = (magnitude + large) - large
        code = (rounded * (2.0 ** (BIAS - 127))).to(tl.int32, bitcast=True) >> DROPPED
    return (code | ((bits >> (32 - BITS)) & (1 << (BITS - 1)))).to(tl.uint8)


@triton.jit
def _float_value(code, MANTISSA: tl.constexpr, BIAS: tl.constexpr, BITS: tl.constexpr = 8):
    """Bits of a narrow float, neither NaN nor Inf -> fp32, exactly."""
    wide = code.to(tl.int32)
    magnitude = wide & ((1 << (BITS - 1)) - 1)
    # Its exponent and mantissa where fp32 has them, then moved by a power of two: subnormals are those of fp32 until
    # then, and need neither a case of their own nor a conversion from integers, which runs at a fraction of the speed.
    value = (magnitude << (23 - MANTISSA)).to(tl.float32, bitcast=True) * (2.0 ** (127 - BIAS))
    # The sign as a bit: a negation is 0 - value in older tritons, which loses the sign of zero.
    signed = value.to(tl.int32, bitcast=True) | ((wide & (1 << (BITS - 1))) << (32 - BITS))
    return signed.to(tl.float32, bitcast=True)


@triton.constexpr_function
def _nf4_level(code):
    return NF4_LEVELS[code]


@triton.constexpr_function
def _nf4_midpoint(code):
    return NF4_MIDPOINTS[code]


@triton.jit
def _nf4_value(code):
    """Codes, int32 -> their levels: eight pairs by the lowest bit, four of those by the next, and so on."""
    level = ()
    for pair in tl.static_range(8):
        level = level + (tl.where((code & 1) == 1, _nf4_level(2 * pair + 1), _nf4_level(2 * pair)),)
    for stage in tl.static_range(1, 4):
        chosen = ()
        for pair in tl.static_range(8 >> stage):
            chosen = chosen + (tl.where((code & (1 << stage)) != 0, level[2 * pair + 1], level[2 * pair]),)
        level = chosen
    return level[0]


@triton.jit
def _nf4_code(quantized, noise, STOCHASTIC: tl.constexpr):
    """fp32 from -1 to 1 -> int32 code."""
    if STOCHASTIC:
        below = tl.full(quantized.shape, 0, tl.int32)
        for code in tl.static_range(1, 15):
            below = below + (quantized >= _nf4_level(code)).to(tl.int32)
        level = _nf4_value(below)
        step = _nf4_value(below + 1) - level
        code = below + (uniform_numbers(noise) * step < quantized - level).to(tl.int32)
    else:
        # A binary search: four comparisons, where the straight count takes fifteen.
        high = quantized > _nf4_midpoint(7)
        second = quantized > tl.where(high, _nf4_midpoint(11), _nf4_midpoint(3))
        upper = tl.where(second, _nf4_midpoint(13), _nf4_midpoint(9))
        third = quantized > tl.where(high, upper, tl.where(second, _nf4_midpoint(5), _nf4_midpoint(1)))
        quarter_3 = tl.where(third, _nf4_midpoint(14), _nf4_midpoint(12))
        quarter_2 = tl.where(third, _nf4_midpoint(10), _nf4_midpoint(8))
        quarter_1 = tl.where(third, _nf4_midpoint(6), _nf4_midpoint(4))
        quarter_0 = tl.where(third, _nf4_midpoint(2), _nf4_midpoint(0))
        upper = tl.where(second, quarter_3, quarter_2)
        fourth = quantized > tl.where(high, upper, tl.where(second, quarter_1, quarter_0))
        code = (high.to(tl.int32) << 3) | (second.to(tl.int32) << 2) | (third.to(tl.int32) << 1) | fourth.to(tl.int32)
    return code


@triton.jit
def _gaussian_level(code, HALF: tl.constexpr):
    """Integer codes as fp32 -> their levels, exactly."""
    square = code * code
    edge = tl.full(code.shape, _EDGE / (HALF * HALF), tl.float32)
    return code * tl.fma(square, edge, tl.full(code.shape, _CENTRE, tl.float32))


@triton.jit
def _gaussian_code(quantized, noise, HALF: tl.constexpr, STOCHASTIC: tl.constexpr):
    """fp32 from -HALF to HALF -> int32 code."""
    place = tl.abs(quantized) * (1.0 / HALF)
    inverse = _INVERSE_0 + place * (_INVERSE_1 + place * (_INVERSE_2 + place * _INVERSE_3))
    position = quantized * inverse
    if STOCHASTIC:
        nearest = tl.floor(position + 0.5)
        level = _gaussian_level(nearest, HALF)
        rest = quantized - level
        direction = ((rest.to(tl.int32, bitcast=True) & _SIGN_MASK) | _ONE_BITS).to(tl.float32, bitcast=True)
        towards = nearest + direction
        step = _gaussian_level(towards, HALF) - level
        moves = uniform_numbers(noise) * tl.abs(step) < tl.abs(rest)
        code = _low_bits_within(tl.where(moves, towards, nearest), -HALF, HALF - 1)
    else:
        code = _low_bits_within(position, -HALF, HALF - 1)
    return code


@triton.jit
def to_code(quantized, noise, C: tl.constexpr):
    """fp32 within the element's range -> a code whose low bits are to be stored: int32, or uint8 of a float.

    Where the device rounds to FP8 itself, `to_words` does.
    """
    if C.element == "nf4":
        code = _nf4_code(quantized, noise, C.is_stochastic)
    elif C.mantissa == 0:
        if C.is_gaussian:
            code = _gaussian_code(quantized, noise, 1 << (C.bits - 1), C.is_stochastic)
        elif C.is_stochastic:
            code = _low_bits_within(quantized + (uniform_numbers(noise) - 0.5), -C.largest, C.largest)
        else:
            code = _low_bits_of_integer(quantized)
    else:
        code = _float_code(quantized, noise, C.mantissa, C.bias, C.largest, C.is_stochastic, C.bits)
    return code


@triton.jit
def _integer_value(bits, C: tl.constexpr):
    """Codes with their highest bit flipped, as the last bits of 2^23 + code -> fp32."""
    # A conversion from integers runs at a fraction of the speed.
    HALF: tl.constexpr = 1 << (C.bits - 1)
    value = bits.to(tl.float32, bitcast=True) - (_TWO_POW_23 + HALF)
    if C.is_gaussian:
        value = _gaussian_level(value, HALF)
    return value


@triton.jit
def from_code(code, C: tl.constexpr):
    """One code a value, uint8, or int32 with no other bits set -> fp32; E4M3 of a device that has it: `from_words`."""
    if C.element == "nf4":
        value = _nf4_value(code)
    elif C.mantissa == 0:
        value = _integer_value(code.to(tl.int32) ^ (_TWO_POW_23_BITS + (1 << (C.bits - 1))), C)
    elif C.is_native_fp8 and C.element == "e5m2":
        value = code.to(tl.uint8).to(tl.float8e5, bitcast=True).to(tl.float32)
    else:
        value = _float_value(code, C.mantissa, C.bias, C.bits)
    return value


@triton.jit
def to_words(quantized, noise, C: tl.constexpr):
    """fp32 [tile, width] within the element's range -> codes by fours, int32 [tile, width / 4]."""
    if C.is_native_fp8 and not C.is_stochastic:
        first, second, third, fourth = by_fours(quantized, C)
        words = floats_to_fp8_word(first, second, third, fourth, C)
    else:
        words = packed(to_code(quantized, noise, C).to(tl.int32), C)
    return words


@triton.jit
def from_words(words, C: tl.constexpr):
    """Codes by fours, int32 [tile, width / 4] -> fp32 [tile, width]."""
    if C.mantissa == 0 and C.element != "nf4":
        value = _integer_value(unpacked(words ^ top_bits(C.bits), _TWO_POW_23_BITS, C), C)
    elif C.is_native_fp8 and C.element == "e4m3":
        first, second, third, fourth = e4m3_word_to_floats(words)
        value = from_fours(first, second, third, fourth, C)
    else:
        value = from_code(unpacked(words, 0, C), C)
    return value
