"""Which tokens take fewer bits, as Triton kernels: entropies, the choice, and where the others' fourth bits lie.

`codec.token_entropy_reference` is the oracle: the same logarithm, the same order of sums, so the same tokens. Example:
2 samples of 10 tokens of 300 channels, 2 of 3 bits: `entropy_kernel` has 20 programs, each of which adds up 64 runs of
8 values, the last 212 of them zeros; `choose_kernel` has 2 programs. Sample 1 with the lowest entropies at tokens 3 and
7 gets the map 0b10001000, 0b00 and the slots 8 9 10 -1 11 12 13 -1 14 15, since sample 0 has the slots 0 to 7.

Loops are written with `while`: older interpreters take no range up to an argument.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_taco.codec.kernel_launch import launch
from lightning_taco.codec.tah_quant_layout import TahQuantLayout
from lightning_taco.codec.token_entropy_reference import LANE_CHANNELS, LANES, LOG2_FACTORS

_LOG2_0, _LOG2_1, _LOG2_2, _LOG2_3, _LOG2_4, _LOG2_5 = (tl.constexpr(factor) for factor in LOG2_FACTORS)
_ONE_BITS = tl.constexpr(0x3F800000)
_INF_BITS = tl.constexpr(0x7F800000)
_MANTISSA = tl.constexpr(0x7FFFFF)
CHUNK_TOKENS = 2048
"""Tokens that a program which has a whole sample looks at together."""
WARPS_PER_SAMPLE, WARPS_PER_TOKEN = 8, LANES // 32
_LANES, _LANE_CHANNELS = tl.constexpr(LANES), tl.constexpr(LANE_CHANNELS)


@triton.jit
def _log2(values):
    bits = values.to(tl.int32, bitcast=True)
    exponent = ((bits >> 23) - 127).to(tl.float32)
    fraction = ((bits & _MANTISSA) | _ONE_BITS).to(tl.float32, bitcast=True) - 1.0
    series = fraction * _LOG2_5 + _LOG2_4
    series = series * fraction + _LOG2_3
    series = series * fraction + _LOG2_2
    series = series * fraction + _LOG2_1
    series = series * fraction + _LOG2_0
    return series * fraction + exponent


@triton.constexpr_function
def _log2_of(size):
    return size.bit_length() - 1


@triton.jit
def _pairwise_sum(values, ROWS: tl.constexpr, SIZE: tl.constexpr):
    """[ROWS, SIZE] -> [ROWS], neighbours first."""
    STAGES: tl.constexpr = _log2_of(SIZE)
    for stage in tl.static_range(STAGES):
        left, right = tl.split(tl.reshape(values, (ROWS, SIZE >> (stage + 1), 2)))
        values = left + right
    return tl.reshape(values, (ROWS,))


@triton.jit
def entropy_kernel(values_ptr, keys_ptr, num_channels, row_stride):
    """values [tokens, num_channels] -> the bits of each token's entropy, int32 [tokens]; program i: token i.

    A lane is a thread, which reads a run of 16 bytes and adds it up by itself: sums over all values of a tensor at
    once make the compiler exchange, and spill, at each stage.
    """
    token = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, _LANES)[:, None] * _LANE_CHANNELS + tl.arange(0, _LANE_CHANNELS)[None, :]
    totals, weighted_sums = tl.full([_LANES], 0.0, tl.float32), tl.full([_LANES], 0.0, tl.float32)
    start = tl.cast(0, tl.int32)
    while start < num_channels:
        channel = start + places
        values = tl.load(values_ptr + token * row_stride + channel, mask=channel < num_channels, other=0.0)
        magnitudes = tl.abs(values.to(tl.float32))
        totals += _pairwise_sum(magnitudes, _LANES, _LANE_CHANNELS)
        weighted_sums += _pairwise_sum(magnitudes * _log2(magnitudes), _LANES, _LANE_CHANNELS)
        start += _LANES * _LANE_CHANNELS
    total = _pairwise_sum(tl.reshape(totals, (1, _LANES)), 1, _LANES)
    weighted = _pairwise_sum(tl.reshape(weighted_sums, (1, _LANES)), 1, _LANES)
    is_finite = (tl.abs(total) < float("inf")) & (tl.abs(weighted) < float("inf"))
    is_positive = is_finite & (total > 0)
    divisor = tl.where(is_positive, total, 1.0)
    entropy = _log2(divisor) - tl.div_rn(weighted, divisor)
    entropy = tl.where(is_positive & (entropy > 0), entropy, 0.0)
    key = tl.where(is_finite, entropy.to(tl.int32, bitcast=True), _INF_BITS)
    tl.store(keys_ptr + token + tl.arange(0, 1), key)


@triton.constexpr_function
def _bits_above(shift):
    """A mask of the bits above a digit of 4 bits that begins at bit `shift`, as int32."""
    return -(1 << (shift + 4)) if shift < 28 else 0


@triton.jit
def _next_digit(keys, num_tokens, largest, num_left, SHIFT: tl.constexpr, CHUNK: tl.constexpr):
    """Four bits more, from SHIFT up, of the num_left smallest of the keys that agree with `largest` above them."""
    values = tl.arange(0, 16)
    counts = tl.full([16], 0, tl.int32)
    start = tl.cast(0, tl.int32)
    while start < num_tokens:
        token = start + tl.arange(0, CHUNK)
        key = tl.load(keys + token, mask=token < num_tokens, other=0)
        agrees = (((key ^ largest) & _bits_above(SHIFT)) == 0) & (token < num_tokens)
        digits = tl.where(agrees, (key >> SHIFT) & 15, -1)
        counts += tl.sum((digits[:, None] == values[None, :]).to(tl.int32), axis=0)
        start += CHUNK
    up_to = tl.cumsum(counts, axis=0)
    digit = tl.minimum(tl.sum((up_to < num_left).to(tl.int32), axis=0), 15)
    num_left -= tl.sum(tl.where(values == digit, up_to - counts, 0), axis=0)
    return largest | (digit << SHIFT), num_left


@triton.jit
def _smallest(keys, num_tokens, few_per_sample, CHUNK: tl.constexpr):
    """The largest of the few smallest keys, and how many keys that equal it are among them."""
    largest, num_left = tl.cast(0, tl.int32), tl.cast(few_per_sample, tl.int32)
    for step in tl.static_range(8):
        largest, num_left = _next_digit(keys, num_tokens, largest, num_left, 28 - 4 * step, CHUNK)
    return largest, num_left


@triton.jit
def _slots(is_few, token, num_few_before, sample, num_tokens, few_per_sample):
    """Where among all tokens of 4 bits each token comes; -1 for those of 3 bits."""
    few_before = num_few_before + tl.cumsum(is_few, axis=0) - is_few
    first = sample * (num_tokens - few_per_sample)
    return tl.where(is_few != 0, -1, first + token - few_before)


@triton.jit
def choose_kernel(keys_ptr, message_ptr, slots_ptr, num_tokens, few_per_sample, map_row_bytes, CHUNK: tl.constexpr):
    """Keys, int32 [samples, num_tokens] -> the map at the start of a message, and slots; program i: sample i."""
    sample = tl.program_id(0).to(tl.int64)
    keys, slots = keys_ptr + sample * num_tokens, slots_ptr + sample * num_tokens
    largest, num_equal = _smallest(keys, num_tokens, few_per_sample, CHUNK)
    num_equal_before, num_few_before = tl.cast(0, tl.int32), tl.cast(0, tl.int32)
    start = tl.cast(0, tl.int32)
    while start < num_tokens:
        token = start + tl.arange(0, CHUNK)
        key = tl.load(keys + token, mask=token < num_tokens, other=_INF_BITS)
        is_equal = ((key == largest) & (token < num_tokens)).to(tl.int32)
        place = num_equal_before + tl.cumsum(is_equal, axis=0) - is_equal
        is_few = ((key < largest) | ((is_equal != 0) & (place < num_equal))).to(tl.int32)
        slot = _slots(is_few, token, num_few_before, sample, num_tokens, few_per_sample)
        tl.store(slots + token, slot.to(tl.int32), mask=token < num_tokens)
        packed = tl.sum(tl.reshape(is_few, (CHUNK // 8, 8)) << tl.arange(0, 8)[None, :], axis=1)
        byte = start // 8 + tl.arange(0, CHUNK // 8)
        tl.store(message_ptr + sample * map_row_bytes + byte, packed.to(tl.uint8), mask=byte < map_row_bytes)
        num_equal_before += tl.sum(is_equal, axis=0)
        num_few_before += tl.sum(is_few, axis=0)
        start += CHUNK


@triton.jit
def slots_kernel(message_ptr, slots_ptr, num_tokens, few_per_sample, map_row_bytes, CHUNK: tl.constexpr):
    """The map of a message -> slots int32 [samples, num_tokens]; program i: sample i."""
    sample = tl.program_id(0).to(tl.int64)
    num_few_before = tl.cast(0, tl.int32)
    start = tl.cast(0, tl.int32)
    while start < num_tokens:
        token = start + tl.arange(0, CHUNK)
        byte = start // 8 + tl.arange(0, CHUNK // 8)
        packed = tl.load(message_ptr + sample * map_row_bytes + byte, mask=byte < map_row_bytes, other=0).to(tl.int32)
        is_few = tl.reshape((packed[:, None] >> tl.arange(0, 8)[None, :]) & 1, (CHUNK,))
        slot = _slots(is_few, token, num_few_before, sample, num_tokens, few_per_sample)
        tl.store(slots_ptr + sample * num_tokens + token, slot.to(tl.int32), mask=token < num_tokens)
        num_few_before += tl.sum(is_few, axis=0)
        start += CHUNK


def choose_tokens_triton(tokens: Tensor, layout: TahQuantLayout, message: Tensor) -> Tensor:
    """Write the map of `tokens` ``[num_tokens, channels]``, of contiguous rows, into `message`, in two launches.

    Returns:
        Slots, int32 ``[num_tokens]``: where among all tokens of 4 bits each comes, -1 for those of 3 bits.
    """
    keys = torch.empty(layout.num_tokens, dtype=torch.int32, device=tokens.device)
    slots = torch.empty_like(keys)
    arguments = (tokens, keys, layout.num_channels, tokens.stride(0))
    launch(entropy_kernel, (layout.num_tokens, 1, 1), arguments, (), num_warps=WARPS_PER_TOKEN)
    sizes = (layout.tokens_per_sample, layout.few_per_sample, layout.map_row_bytes)
    grid = (layout.num_samples, 1, 1)
    launch(choose_kernel, grid, (keys, message, slots, *sizes), (CHUNK_TOKENS,), num_warps=WARPS_PER_SAMPLE)
    return slots


def slots_triton(message: Tensor, layout: TahQuantLayout) -> Tensor:
    """The slots, as of `choose_tokens_triton`, that the map in `message` says, in one launch."""
    slots = torch.empty(layout.num_tokens, dtype=torch.int32, device=message.device)
    sizes = (layout.tokens_per_sample, layout.few_per_sample, layout.map_row_bytes)
    grid = (layout.num_samples, 1, 1)
    launch(slots_kernel, grid, (message, slots, *sizes), (CHUNK_TOKENS,), num_warps=WARPS_PER_SAMPLE)
    return slots
