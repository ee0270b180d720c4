"""The codec in plain torch, through its public functions on CPU: formats, error bounds, and values that break codecs.

Oracles here are the formulas of `codec.reference` written a second time, in float64 or with explicit matrices.
"""

import doctest
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_taco import codec as codec_module
from lightning_taco.codec import MessageLayout, decode, decode_sum, encode, requantize
from lightning_taco.codec.reference import hadamard_transform_reference
from lightning_taco.config import BLOCK_SIZES, CodecConfig

CODE_MAX = {"e4m3": 448.0, "int8": 127.0}
MODES: dict[str, dict[str, Any]] = {
    "plain": {"rotation": False},
    "rotated": {},
    "dual": {"scale_mode": "dual"},
}


def codecs(block_sizes: tuple[int, ...] = (128,), **fixed: Any) -> list[Any]:
    """Every element and mode at these block sizes, as parameters with readable names."""
    return [
        pytest.param(CodecConfig(element=element, block_size=block_size, **mode, **fixed), id=name)
        for element in CODE_MAX
        for block_size in block_sizes
        for mode_name, mode in MODES.items()
        for name in [f"{element}-{block_size}-{mode_name}"]
    ]


def content(messages: Tensor, codec: CodecConfig, num_values: int) -> Tensor:
    """The codes and scales of each message: all of it but the padding at its end."""
    layout = MessageLayout.of(num_values, codec)
    num_scales = 2 if codec.scale_mode == "dual" else 1
    return messages[:, : layout.scale_offset_bytes + 4 * num_scales * layout.num_blocks]


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    """Equal down to the sign of zero; a NaN equals any NaN, since processors choose its payload."""
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    actual, expected = actual.cpu(), expected.cpu()
    nan = expected.isnan()
    assert torch.equal(actual.isnan(), nan)
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[actual.element_size()]
    differs = (actual.contiguous().view(bits) != expected.contiguous().view(bits)) & ~nan
    places = differs.nonzero()[:5].tolist()
    assert not places, f"{int(differs.sum())} differ: {places} {actual[differs][:5]} {expected[differs][:5]}"


def sylvester(order: int) -> Tensor:
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while matrix.shape[0] < order:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix


def e4m3_table() -> Tensor:
    """The 256 values of E4M3: no Inf, 0x7F and 0xFF are NaN."""
    values = []
    for code in range(256):
        exponent, mantissa = (code >> 3) & 15, code & 7
        magnitude = 2.0**-9 * mantissa if exponent == 0 else 2.0 ** (exponent - 7) * (1 + mantissa / 8)
        magnitude = math.nan if code & 0x7F == 0x7F else magnitude
        values.append(-magnitude if code >= 128 else magnitude)
    return torch.tensor(values)


def parse(messages: Tensor, codec: CodecConfig, num_values: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Codes as fp32 ``[R, num_blocks, G]``, and scale_inv and alpha ``[R, num_blocks]``, cut out by byte offsets."""
    layout = MessageLayout.of(num_values, codec)
    codes = messages[:, : layout.num_blocks * codec.block_size].contiguous()
    values = codes.view(torch.int8).float() if codec.element == "int8" else e4m3_table()[codes.long()]
    start, middle = layout.scale_offset_bytes, layout.alpha_offset_bytes
    size = 4 * layout.num_blocks
    scale_inv = messages[:, start : start + size].clone().view(torch.float32)
    alpha = None
    if codec.scale_mode == "dual":
        alpha = messages[:, middle : middle + size].clone().view(torch.float32)
    return values.view(messages.shape[0], layout.num_blocks, codec.block_size), scale_inv, alpha


def rotated_values(messages: Tensor, codec: CodecConfig, num_values: int) -> Tensor:
    """What the messages say before the rotation is undone, fp32 ``[R, num_blocks, G]``."""
    codes, scale_inv, alpha = parse(messages, codec, num_values)
    return codes * (scale_inv if alpha is None else scale_inv / alpha).unsqueeze(-1)


def sum_in_order(rows: Tensor) -> Tensor:
    total = rows[0]
    for row in rows[1:]:
        total = total + row
    return total


def blocks_of(values: Tensor, block_size: int) -> Tensor:
    """Float64 ``[R, num_blocks, G]``, the last block filled with zeros."""
    padding = -values.shape[1] % block_size
    padded = torch.nn.functional.pad(values.double(), (0, padding))
    return padded.view(values.shape[0], -1, block_size)


def relative_l2_error(actual: Tensor, expected: Tensor) -> float:
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


# Values.


def student_t3(generator: torch.Generator, *shape: int) -> Tensor:
    normal, *squares = torch.randn(4, *shape, generator=generator)
    return normal / (sum(part * part for part in squares) / 3).sqrt()


def scale_mixture(generator: torch.Generator, *shape: int) -> Tensor:
    """Normal values whose standard deviation is itself spread over e^(1.5 n)."""
    return torch.randn(*shape, generator=generator) * torch.exp(1.5 * torch.randn(*shape, generator=generator))


def outlier_channels(generator: torch.Generator, *shape: int) -> Tensor:
    """Eight channels are 50 times larger: in blocks 0, 1, 2, 3, 4, 4, 5 and 5 of 128 values."""
    values = torch.randn(*shape, generator=generator)
    values[:, [9, 150, 300, 470, 530, 601, 650, 730]] *= 50
    return values


def off_centre(generator: torch.Generator, *shape: int) -> Tensor:
    """A mean of ten times the spread, which the rotation gathers in one coefficient."""
    return 10 + torch.randn(*shape, generator=generator)


DISTRIBUTIONS: dict[str, Callable[..., Tensor]] = {
    "gauss": lambda generator, *shape: torch.randn(*shape, generator=generator),
    "student_t3": student_t3,
    "scale_mixture": scale_mixture,
    "outlier_channels": outlier_channels,
    "off_centre": off_centre,
}


def sample(name: str, *shape: int, seed: int = 0) -> Tensor:
    return DISTRIBUTIONS[name](torch.Generator().manual_seed(seed), *shape)


def adversarial_row(dtype: torch.dtype, block_size: int) -> Tensor:
    """One row ``[1, N]`` of blocks that each hold something unpleasant, ending in a short block."""
    generator = torch.Generator().manual_seed(5)
    normal = torch.randn(block_size, generator=generator)
    half = dtype == torch.float16
    blocks = [torch.zeros(block_size), -torch.zeros(block_size), normal]
    for value in (math.nan, math.inf, -math.inf, 1e6, 3e4, 1e30, -1e30, 1e-30, -0.0, 6e-8):
        for position in (0, block_size // 3, block_size - 1):
            block = normal.clone()
            block[position] = value
            blocks.append(block)
        blocks.append(torch.full((block_size,), value))
        blocks.append(value * torch.where(torch.rand(block_size, generator=generator) < 0.5, -1.0, 1.0))
    # Down through the smallest normal and the subnormal numbers of fp32, and around the limit of 2^-110.
    for exponent in (90, 100, 105, 108, 109, 110, 111, 112, 113, 114, 116, 118, 120, 122, 126, 130, 140, 149):
        blocks.append(normal * 2.0**-exponent)
        blocks.append(torch.full((block_size,), 2.0**-exponent))
    for exponent in (20, 60, 66, 100, 120):
        blocks.append(normal * 2.0**exponent)
    # Exactly halfway between codes, whichever the element: the largest magnitude is the largest code.
    for code_max in CODE_MAX.values():
        halves = torch.arange(block_size) % 120 + 0.5
        halves[0] = code_max
        blocks.append(halves)
    blocks.append(normal[: block_size // 2 + 3])
    row = torch.cat(blocks)
    if half:
        row = row.clamp(-3e4, 3e4).where(row.isfinite(), row)
    return row.to(dtype).unsqueeze(0)


# The rotation.


@pytest.mark.parametrize("order", BLOCK_SIZES)
def test_rotation_is_the_sylvester_matrix(order: int) -> None:
    matrix = sylvester(order)
    assert torch.equal(matrix @ matrix.T, order * torch.eye(order, dtype=torch.float64))
    assert torch.equal(hadamard_transform_reference(torch.eye(order)).double(), matrix)
    # Integers whose sums fp32 holds exactly.
    integers = torch.randint(-1000, 1001, (2, 3, order)).float()
    assert torch.equal(hadamard_transform_reference(integers).double(), integers.double() @ matrix)
    values = torch.randn(16, order)
    error = (hadamard_transform_reference(values).double() - values.double() @ matrix).abs()
    # Each of log2(order) stages rounds a sum once.
    bound = math.log2(order) * 2.0**-24 * values.double().abs().sum(-1, keepdim=True)
    assert (error <= bound).all()


@pytest.mark.parametrize("codec", [codec for codec in codecs(BLOCK_SIZES) if codec.values[0].rotation])
def test_a_row_of_the_matrix_becomes_one_code(codec: CodecConfig) -> None:
    block_size = codec.block_size
    amplitude = torch.tensor(-3.7)
    message = encode((amplitude * sylvester(block_size)).float().view(1, -1), codec)
    codes, scale_inv, alpha = parse(message, codec, block_size**2)
    assert torch.equal(codes[0], -CODE_MAX[codec.element] * torch.eye(block_size))
    expected = amplitude.abs() * (1.0 if alpha is None else alpha[0, 0])
    assert torch.equal(scale_inv[0], (expected / CODE_MAX[codec.element]).expand(block_size))


# Error bounds.


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("codec", codecs(BLOCK_SIZES))
def test_no_value_is_further_off_than_the_format_allows(codec: CodecConfig, name: str) -> None:
    values = sample(name, 4, 1024)
    actual = blocks_of(decode(encode(values, codec), codec, 1024, torch.float32), codec.block_size)
    expected = blocks_of(values, codec.block_size)
    coefficients = expected
    if codec.rotation:
        coefficients = expected @ sylvester(codec.block_size) / codec.block_size
    amax = coefficients.abs().amax(-1, keepdim=True)
    if codec.element == "int8":
        step_error = (0.5 * amax / 127).expand_as(coefficients)
    else:  # half a unit in the fourth significant bit, or half of the subnormals' spacing of 2^-9
        step_error = torch.maximum(coefficients.abs() / 16, amax / 448 * 2.0**-10)
    step_error = step_error * (1 + 1e-5) + 1e-6 * amax  # fp32 arithmetic
    error = (actual - expected).abs()
    if not codec.rotation:
        assert (error <= step_error).all()
        return
    # A value is the sum of all coefficients with signs; over a block their energies add up, times its size.
    assert (error <= step_error.sum(-1, keepdim=True)).all()
    norm_bound = math.sqrt(codec.block_size) * step_error.norm(dim=-1)
    assert ((actual - expected).norm(dim=-1) <= norm_bound).all()


ERROR_DB = {  # E4M3, rotated E4M3, INT8, rotated INT8 at block 128
    "gauss": (-31.8, -31.8, -43.8, -43.8),
    "student_t3": (-33.2, -31.8, -36.9, -44.5),
    "scale_mixture": (-37.2, -31.7, -34.6, -47.1),
    "outlier_channels": (-39.8, -31.7, -32.6, -48.8),
}


@pytest.mark.parametrize("name", ERROR_DB)
def test_relative_error_is_the_published_one(name: str) -> None:
    # Heavy tails scatter by 0.5 dB from sample to sample: these seeds give samples near the average.
    values = sample(name, 512, 1280, seed=9 if name == "outlier_channels" else 0)
    for element, (plain, rotated) in {"e4m3": ERROR_DB[name][:2], "int8": ERROR_DB[name][2:]}.items():
        for mode, expected in {"plain": plain, "rotated": rotated, "dual": rotated}.items():
            codec = CodecConfig(element=element, **MODES[mode])
            error = relative_l2_error(decode(encode(values, codec), codec, 1280, torch.float32), values)
            assert 20 * math.log10(error) == pytest.approx(expected, abs=0.3), (element, mode)


@pytest.mark.parametrize("codec", codecs())
def test_a_mean_of_ten_times_the_spread_costs_no_more_than_the_format(codec: CodecConfig) -> None:
    values = sample("off_centre", 64, 1024)
    error = relative_l2_error(decode(encode(values, codec), codec, 1024, torch.float32), values)
    # Rotated INT8 spends its steps on the one large coefficient: a step of 10/127, spread over all 128 values.
    rotated_int8 = 1 / 127 / math.sqrt(12) * math.sqrt(128)
    bound = {
        ("e4m3", False): 2.0**-4 / math.sqrt(3),
        ("int8", False): 1.4 / 127 / math.sqrt(12),
        ("e4m3", True): 0.02,
        ("int8", True): rotated_int8,
    }[codec.element, codec.rotation]
    assert bound / 10 < error <= bound * 1.02


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("codec", codecs((64,)))
def test_dtypes_are_read_and_written_through_fp32(codec: CodecConfig, dtype: torch.dtype) -> None:
    values = sample("gauss", 3, 300).to(dtype)
    message = encode(values, codec)
    assert torch.equal(message, encode(values.float(), codec))
    assert_same_bits(decode(message, codec, 300, dtype), decode(message, codec, 300, torch.float32).to(dtype))
    assert_same_bits(decode_sum(message, codec, 300, dtype), decode_sum(message, codec, 300, torch.float32).to(dtype))


# Zeros.


@pytest.mark.parametrize("zero", [0.0, -0.0])
@pytest.mark.parametrize("codec", codecs(BLOCK_SIZES))
def test_zeros_stay_zeros(codec: CodecConfig, zero: float) -> None:
    message = encode(torch.full((3, 300), zero), codec)
    codes, scale_inv, alpha = parse(message, codec, 300)
    assert not codes.any()
    assert not scale_inv.any()
    assert alpha is None or torch.equal(alpha, torch.full_like(alpha, 1000.0))
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert torch.equal(decode(message, codec, 300, dtype), torch.zeros(3, 300, dtype=dtype))
        assert torch.equal(decode_sum(message, codec, 300, dtype), torch.zeros(300, dtype=dtype))
    again = requantize(message, codec, 300)
    assert torch.equal(decode(again, codec, 300, torch.float32), torch.zeros(1, 300))


@pytest.mark.parametrize("zero_block", [0, 1, 2])
@pytest.mark.parametrize("codec", codecs((32, 128)))
def test_one_zero_block_among_normal_ones(codec: CodecConfig, zero_block: int) -> None:
    num_values = 2 * codec.block_size + 5  # block 2 is the tail
    values = sample("gauss", 2, num_values)
    expected = decode(encode(values, codec), codec, num_values, torch.float32)
    place = slice(zero_block * codec.block_size, (zero_block + 1) * codec.block_size)
    values[1, place] = 0
    expected[1, place] = 0
    assert torch.equal(decode(encode(values, codec), codec, num_values, torch.float32), expected)


@pytest.mark.parametrize("codec", codecs())
def test_all_sources_zero_but_one(codec: CodecConfig) -> None:
    values = torch.zeros(4, 300)
    values[2] = sample("gauss", 300)
    messages = encode(values, codec)
    expected = decode(messages[2:3], codec, 300, torch.float32)
    assert torch.equal(decode_sum(messages, codec, 300, torch.float32), expected[0])
    again = decode(requantize(messages, codec, 300), codec, 300, torch.float32)
    assert relative_l2_error(again, expected) < 1e-6  # the same block again: on the grid that it was on


# Non-finite, huge and tiny values.


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("codec", codecs((32, 128)))
def test_non_finite_stays_so_in_its_block_and_only_there(codec: CodecConfig, dtype: torch.dtype, value: float) -> None:
    block_size = codec.block_size
    num_values = 3 * block_size + 7
    values = sample("gauss", 2, num_values).to(dtype)
    places = [0, block_size - 1, block_size + block_size // 2, num_values - 1]
    clean = encode(values, codec)
    for place in places:
        poisoned = values.clone()
        poisoned[1, place] = value
        message = encode(poisoned, codec)
        in_block = torch.zeros(2, num_values, dtype=torch.bool)
        start = place // block_size * block_size
        in_block[1, start : start + block_size] = True
        for out_dtype in (dtype, torch.float32):
            expected = decode(clean, codec, num_values, out_dtype).masked_fill(in_block, math.nan)
            assert_same_bits(decode(message, codec, num_values, out_dtype), expected)
        total = decode_sum(message, codec, num_values, dtype)
        assert torch.equal(total.isnan(), in_block.any(0))
        again = decode(requantize(message, codec, num_values), codec, num_values, dtype)
        assert torch.equal(again[0].isnan(), in_block.any(0))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("codec", codecs((32, 128)))
def test_a_whole_block_of_non_finite_values(codec: CodecConfig, value: float) -> None:
    values = sample("gauss", 1, 2 * codec.block_size)
    values[0, : codec.block_size] = value
    actual = decode(encode(values, codec), codec, 2 * codec.block_size, torch.float32)[0]
    assert actual[: codec.block_size].isnan().all()
    assert actual[codec.block_size :].isfinite().all()


@pytest.mark.parametrize("codec", codecs((32, 128)))
def test_a_sum_that_overflows_is_not_hidden(codec: CodecConfig) -> None:
    values = torch.full((2, 2 * codec.block_size), 3e38)
    values[:, codec.block_size :] = 1.0
    messages = encode(values, codec)
    total = decode_sum(messages, codec, 2 * codec.block_size, torch.float32)
    assert not total[: codec.block_size].isfinite().any()
    again = decode(requantize(messages, codec, 2 * codec.block_size), codec, 2 * codec.block_size, torch.float32)
    assert not again[0, : codec.block_size].isfinite().any()
    for result in (total, again[0]):
        assert result[codec.block_size :].sub(2).abs().max() < 0.02


EXTREMES = [
    (torch.float32, 1e6),
    (torch.float32, 1e30),
    (torch.float32, 1e-30),
    (torch.bfloat16, 1e6),
    (torch.bfloat16, 1e30),
    (torch.bfloat16, 1e-30),
    (torch.float16, 3e4),
    (torch.float16, 6e-8),  # its smallest subnormal number
]


@pytest.mark.parametrize(("dtype", "value"), EXTREMES)
@pytest.mark.parametrize("codec", codecs(BLOCK_SIZES))
def test_huge_and_tiny_values_survive(codec: CodecConfig, dtype: torch.dtype, value: float) -> None:
    block_size = codec.block_size
    signs = torch.where(torch.rand(block_size) < 0.5, -1.0, 1.0)
    alone = torch.zeros(block_size)
    alone[block_size // 3] = value
    spike = torch.randn(block_size)
    spike[5] = -value
    values = torch.cat((torch.full((block_size,), value), value * signs, alone, spike)).to(dtype).view(1, -1)
    actual = decode(encode(values, codec), codec, 4 * block_size, dtype)
    assert actual.isfinite().all()
    for got, expected in zip(actual[0].split(block_size), values[0].split(block_size), strict=True):
        if expected.dtype == torch.float16 and value < 1e-6:  # the result rounds to a multiple of the value itself
            assert (got.float() - expected.float()).abs().max() <= (value if expected.abs().max() < 1e-6 else 0.3)
        else:
            assert relative_l2_error(got, expected) <= (0.04 if codec.element == "e4m3" else 0.012)
    constant = actual[0, :block_size]
    assert relative_l2_error(constant, values[0, :block_size]) <= 2.0**-7


@pytest.mark.parametrize("codec", codecs((32, 512)))
def test_the_smallest_block_that_is_sent(codec: CodecConfig) -> None:
    smallest = 2.0**-110
    if codec.scale_mode == "dual":
        smallest /= 1000.0  # alpha's largest value
    block = torch.full((1, codec.block_size), smallest)
    kept = decode(encode(block * (1 + 1e-6), codec), codec, codec.block_size, torch.float32)
    dropped = decode(encode(block * (1 - 1e-6), codec), codec, codec.block_size, torch.float32)
    assert relative_l2_error(kept, block) < 1e-3
    assert torch.equal(dropped, torch.zeros_like(block))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("codec", codecs(BLOCK_SIZES))
def test_no_block_turns_non_finite_or_loses_a_non_finite_value(codec: CodecConfig, dtype: torch.dtype) -> None:
    values = adversarial_row(dtype, codec.block_size)
    actual = decode(encode(values, codec), codec, values.shape[1], dtype)
    bad = blocks_of(values, codec.block_size).isfinite().logical_not().any(-1)
    got_bad = blocks_of(actual, codec.block_size).isfinite().logical_not()
    assert torch.equal(got_bad.any(-1), bad)


# Symmetry and idempotence.


@pytest.mark.parametrize("codec", codecs(BLOCK_SIZES))
def test_negated_values_decode_to_negated_values(codec: CodecConfig) -> None:
    ties = torch.arange(-300, 300).float() / 2
    values = torch.stack((sample("student_t3", 600), ties, 1e-30 * ties))
    there = decode(encode(values, codec), codec, 600, torch.float32)
    back = decode(encode(-values, codec), codec, 600, torch.float32)
    assert torch.equal(-back, there)


@pytest.mark.parametrize("exponent", [-90, -9, 0, 3, 100])
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("element", ["e4m3", "int8"])
def test_representable_values_come_back_exactly(element: str, block_size: int, exponent: int) -> None:
    codec = CodecConfig(element=element, block_size=block_size, rotation=False)
    code_max = CODE_MAX[element]
    table = e4m3_table() if element == "e4m3" else torch.arange(-127.0, 128.0)
    table = table[table.isfinite()]
    # Every code that there is; the first of each block is the largest, so that the block's scale is a power of two.
    num_blocks = -(-len(table) // (block_size - 1))
    blocks = torch.full((num_blocks, block_size), code_max)
    flat = torch.full((num_blocks * (block_size - 1),), -code_max)
    flat[: len(table)] = table
    blocks[:, 1:] = flat.view(num_blocks, block_size - 1)
    values = (blocks * 2.0**exponent).view(1, -1)
    message = encode(values, codec)
    decoded = decode(message, codec, values.shape[1], torch.float32)
    assert torch.equal(decoded, values)
    assert torch.equal(encode(decoded, codec), message)


@pytest.mark.parametrize("codec", codecs())
def test_ties_go_to_the_even_code(codec: CodecConfig) -> None:
    # Rows 0 and 1 of the matrix carry the largest code and a half-way value, which fp32 adds exactly.
    matrix = sylvester(128).float() if codec.rotation else torch.eye(128)
    largest, halves = {
        "int8": (127.0, {0.5: 0, 1.5: 2, 2.5: 2, 126.5: 126}),
        "e4m3": (448.0, {17.0: 16, 19.0: 20, 432.0: 448, 2.0**-10: 0, 3 * 2.0**-10: 2.0**-8, 15 * 2.0**-10: 2.0**-6}),
    }[codec.element]
    for value, expected in halves.items():
        for sign in (1, -1):
            block = largest * matrix[0] + sign * value * matrix[1]
            codes, _, _ = parse(encode(block.view(1, -1), codec), codec, 128)
            if codec.scale_mode == "merged":
                assert codes[0, 0, :2].tolist() == [largest, sign * expected]
            else:  # alpha rounds: a tie may fall to either side
                assert abs(codes[0, 0, 1].item() - sign * value) <= abs(expected - value) * (1 + 1e-6)


# Shapes.


@pytest.mark.parametrize("codec", codecs())
def test_tails_of_every_length(codec: CodecConfig) -> None:
    values = sample("student_t3", 2, 300)
    for num_values in range(1, 301):
        part = values[:, :num_values]
        layout = MessageLayout.of(num_values, codec)
        num_padded = layout.num_blocks * codec.block_size
        padded = torch.nn.functional.pad(part, (0, num_padded - num_values))
        message = encode(part, codec)
        assert torch.equal(message, encode(padded, codec))
        decoded = decode(message, codec, num_values, torch.float32)
        assert torch.equal(decoded, decode(message, codec, num_padded, torch.float32)[:, :num_values])
        assert relative_l2_error(decoded, part) < 0.07  # one value alone: E4M3's worst is 1/16


@pytest.mark.parametrize("codec", codecs((64,)))
def test_strided_input(codec: CodecConfig) -> None:
    base = sample("gauss", 6, 700)
    views = [
        base[:, 3:303],
        base[::2, :300],
        base[:, ::2],
        base.t()[:300],
        base[:1, :300].expand(4, 300),
        base[:, :1].expand(6, 300),
        base.view(2, 3, 700).transpose(0, 1)[:, 1, :300],
        base[:, 5:6],
    ]
    for view in views:
        copy = view.clone(memory_format=torch.contiguous_format)
        assert torch.equal(encode(view, codec), encode(copy, codec))


@pytest.mark.parametrize("codec", codecs())
def test_no_values_and_no_rows(codec: CodecConfig) -> None:
    message_bytes = MessageLayout.of(300, codec).message_bytes
    assert encode(torch.ones(0, 300), codec).shape == (0, message_bytes)
    assert decode(torch.ones(0, message_bytes, dtype=torch.uint8), codec, 300, torch.float16).shape == (0, 300)
    for num_rows in (0, 1, 3):
        message = encode(torch.ones(num_rows, 0, dtype=torch.bfloat16), codec)
        assert (message.shape, message.dtype) == ((num_rows, 0), torch.uint8)
        assert decode(message, codec, 0, torch.bfloat16).shape == (num_rows, 0)
    message = encode(torch.ones(3, 0), codec)
    assert decode_sum(message, codec, 0, torch.float32).shape == (0,)
    assert decode_sum(message, codec, 0, torch.float32, average=True).shape == (0,)
    assert requantize(message, codec, 0).shape == (1, 0)


# Sums.


def cancelling_rows(num_values: int) -> Tensor:
    """Three rows whose fp32 sum depends on its order: the first two cancel to something like the third."""
    first = sample("gauss", num_values, seed=1) * 1e4
    noise = sample("gauss", 2, num_values, seed=2)
    return torch.stack((first, noise[0], -first + noise[1]))


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("codec", codecs((32, 128)))
def test_decode_sum_adds_in_fp32_in_row_order(codec: CodecConfig, average: bool) -> None:
    messages = encode(cancelling_rows(300), codec)
    results = []
    for order in ([0, 1, 2], [1, 2, 0], [2, 0, 1]):
        ordered = messages[order].contiguous()
        total = sum_in_order(rotated_values(ordered, codec, 300))
        if average:
            total = total * (1 / 3)
        expected = (hadamard_transform_reference(total) if codec.rotation else total).flatten()[:300]
        actual = decode_sum(ordered, codec, 300, torch.float32, average=average)
        assert_same_bits(actual, expected)
        results.append(actual)
    assert not torch.equal(results[0], results[2]), "the order of these rows should matter"
    decoded = decode(messages, codec, 300, torch.float32).double()
    reference = decoded.mean(0) if average else decoded.sum(0)
    assert (results[0] - reference).abs().max() <= 3e-7 * 20 * decoded.abs().max()


@pytest.mark.parametrize("codec", codecs())
def test_one_source_is_its_own_sum_and_average(codec: CodecConfig) -> None:
    message = encode(sample("gauss", 1, 300), codec)
    expected = decode(message, codec, 300, torch.float32)[0]
    for average in (False, True):
        assert_same_bits(decode_sum(message, codec, 300, torch.float32, average=average), expected)


def message_by_hand(rotated: Tensor, codec: CodecConfig, num_values: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scale_inv and alpha of values that are rotated already, fp32 ``[num_blocks, G]``."""
    code_max = torch.tensor(CODE_MAX[codec.element])
    alpha = torch.ones(rotated.shape[0], 1)
    if codec.scale_mode == "dual":
        energy = rotated * rotated
        while energy.shape[1] > 1:
            energy = energy[:, 0::2] + energy[:, 1::2]
        root = (energy + 1e-6).double().sqrt().float()
        alpha = (code_max / root).clamp(1e-3, 1e3)
        rotated = rotated * alpha
    amax = rotated.abs().amax(1, keepdim=True)
    quantized = rotated * (code_max / amax)
    if codec.element == "int8":
        codes = quantized.round()
    else:
        # To nearest in float64, ties to the even code: among equally near ones, the one with the even code.
        table = e4m3_table()[:127].double()
        distance = (quantized.double().abs().unsqueeze(-1) - table).abs()
        tie_break = torch.arange(127) % 2
        nearest = distance.amin(-1, keepdim=True)
        index = torch.where(distance == nearest, tie_break, 2).argmin(-1)
        codes = table[index].float() * quantized.sign()
    return codes, (amax / code_max)[:, 0], alpha[:, 0]


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("codec", codecs((32, 128)))
def test_requantize_encodes_the_rotated_sum(codec: CodecConfig, average: bool) -> None:
    messages = encode(cancelling_rows(300), codec)
    total = sum_in_order(rotated_values(messages, codec, 300)) * (1 / 3 if average else 1)
    expected_codes, expected_scale_inv, expected_alpha = message_by_hand(total, codec, 300)
    message = requantize(messages, codec, 300, average=average)
    assert (message.shape, message.dtype) == ((1, messages.shape[1]), torch.uint8)
    codes, scale_inv, alpha = parse(message, codec, 300)
    assert torch.equal(codes[0], expected_codes)
    assert_same_bits(scale_inv[0], expected_scale_inv)
    if alpha is not None:
        assert_same_bits(alpha[0], expected_alpha)


@pytest.mark.parametrize("codec", codecs(BLOCK_SIZES))
def test_requantize_is_close_to_encoding_the_decoded_sum(codec: CodecConfig) -> None:
    num_values = 64 * codec.block_size
    messages = encode(sample("gauss", 4, num_values), codec)
    total = decode_sum(messages, codec, num_values, torch.float32)
    direct = encode(total.unsqueeze(0), codec)
    message = requantize(messages, codec, num_values)
    differing = (parse(message, codec, num_values)[0] != parse(direct, codec, num_values)[0]).float().mean()
    assert differing <= 2e-3
    decoded = decode(message, codec, num_values, torch.float32)[0]
    assert relative_l2_error(decoded, decode(direct, codec, num_values, torch.float32)[0]) <= 3e-3
    assert relative_l2_error(decoded, total) <= (0.03 if codec.element == "e4m3" else 0.01)


# Scale modes.


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("element", ["e4m3", "int8"])
def test_dual_equals_merged_up_to_rounding_ties(element: str, name: str) -> None:
    merged, dual = CodecConfig(element=element), CodecConfig(element=element, scale_mode="dual")
    values = sample(name, 256, 1024)
    merged_message, dual_message = encode(values, merged), encode(values, dual)
    merged_codes, _, _ = parse(merged_message, merged, 1024)
    dual_codes, _, alpha = parse(dual_message, dual, 1024)
    differing = merged_codes != dual_codes
    assert differing.float().mean() <= 1e-4
    # Where they differ, they are neighbours.
    spacing = (merged_codes.abs() / 8).clamp_min(2.0**-9) * 1.01 if element == "e4m3" else 1.0
    assert ((merged_codes - dual_codes).abs() <= spacing).all()
    difference = relative_l2_error(
        decode(dual_message, dual, 1024, torch.float32), decode(merged_message, merged, 1024, torch.float32)
    )
    assert difference <= 1e-3
    energy = blocks_of(values, 128).square().mean(-1)
    expected_alpha = (CODE_MAX[element] / (energy + 1e-6).sqrt()).clamp(1e-3, 1e3)
    torch.testing.assert_close(alpha.double(), expected_alpha, rtol=1e-6, atol=0)


# Buffers.


@pytest.mark.parametrize("codec", codecs((32, 128)))
def test_out_buffers_are_filled_and_nothing_else_is(codec: CodecConfig) -> None:
    values = sample("gauss", 3, 301)
    message_bytes = MessageLayout.of(301, codec).message_bytes
    buffer = torch.full((4 * message_bytes,), 255, dtype=torch.uint8)
    out = buffer[message_bytes // 2 // 16 * 16 :][: 3 * message_bytes].view(3, message_bytes)
    messages = encode(values, codec)
    assert encode(values, codec, out=out).data_ptr() == out.data_ptr()
    assert torch.equal(content(out, codec, 301), content(messages, codec, 301))
    out.fill_(255)
    assert (buffer == 255).all(), "written outside of out"

    one = buffer[:message_bytes].view(1, message_bytes)
    assert requantize(messages, codec, 301, out=one).data_ptr() == one.data_ptr()
    assert torch.equal(content(one, codec, 301), content(requantize(messages, codec, 301), codec, 301))
    assert (buffer[message_bytes:] == 255).all()

    for dtype in (torch.bfloat16, torch.float32):
        floats = torch.full((5, 320), math.nan, dtype=dtype)
        rows = floats[1:4, 7:308]
        assert decode(messages, codec, 301, dtype, out=rows).data_ptr() == rows.data_ptr()
        assert_same_bits(rows, decode(messages, codec, 301, dtype))
        rows.fill_(math.nan)
        assert floats.isnan().all(), "written outside of out"
        total = floats.view(-1)[16 : 16 + 301]
        assert decode_sum(messages, codec, 301, dtype, out=total).data_ptr() == total.data_ptr()
        assert_same_bits(total, decode_sum(messages, codec, 301, dtype))
        total.fill_(math.nan)
        assert floats.isnan().all(), "written outside of out"


def test_inputs_are_left_alone() -> None:
    codec = CodecConfig(element="e4m3", scale_mode="dual")
    values = sample("gauss", 3, 300)
    copy = values.clone()
    messages = encode(values, codec)
    messages_copy = messages.clone()
    decode(messages, codec, 300, torch.float32)
    decode_sum(messages, codec, 300, torch.float32, average=True)
    requantize(messages, codec, 300, average=True)
    assert torch.equal(values, copy)
    assert torch.equal(messages, messages_copy)


# Errors.

AUTO_TEXT = "the codec's element is still 'auto'; name one with codec.resolved('e4m3' or 'int8')."


@pytest.mark.parametrize(
    ("values", "codec", "error", "text"),
    [
        (torch.ones(1, 8), CodecConfig(element="auto"), TypeError, AUTO_TEXT),
        (
            torch.ones(1, 8, dtype=torch.float64),
            CodecConfig(element="int8"),
            TypeError,
            "values have dtype torch.float64; bfloat16, float16 or float32 is needed.",
        ),
        (
            torch.ones(1, 8, dtype=torch.int32),
            CodecConfig(element="e4m3"),
            TypeError,
            "values have dtype torch.int32; bfloat16, float16 or float32 is needed.",
        ),
        (
            torch.ones(8),
            CodecConfig(element="int8"),
            ValueError,
            "values have shape (8,); [rows, values] is needed, one row per message.",
        ),
        (
            torch.ones(2, 2, 2, 8),
            CodecConfig(element="int8"),
            ValueError,
            "values have shape (2, 2, 2, 8); [rows, values] is needed, one row per message.",
        ),
        (
            torch.ones(2, 2, 8),
            CodecConfig(element="int8"),
            ValueError,
            "values have segments of 8 values, which cut blocks of 128; pass values.flatten(1).",
        ),
    ],
)
def test_encode_refuses(values: Tensor, codec: CodecConfig, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=f"^{re.escape(text)}$"):
        encode(values, codec)


READERS: dict[str, Callable[..., Tensor]] = {
    "decode": lambda messages, codec, num_values: decode(messages, codec, num_values, torch.float32),
    "decode_sum": lambda messages, codec, num_values: decode_sum(messages, codec, num_values, torch.float32),
    "requantize": requantize,
}


@pytest.mark.parametrize("reader", READERS)
def test_readers_refuse_messages_of_another_size(reader: str) -> None:
    codec = CodecConfig(element="int8", block_size=64)
    message_bytes = MessageLayout.of(300, codec).message_bytes
    wrong: list[tuple[Tensor, str]] = [
        (torch.zeros(2, message_bytes - 16, dtype=torch.uint8), f"(2, {message_bytes - 16}) and dtype torch.uint8"),
        (torch.zeros(message_bytes, dtype=torch.uint8), f"({message_bytes},) and dtype torch.uint8"),
        (torch.zeros(2, message_bytes, dtype=torch.int8), f"(2, {message_bytes}) and dtype torch.int8"),
    ]
    for messages, given in wrong:
        text = (
            f"messages have shape {given}; 300 values in int8, block 64, Hadamard need uint8 [rows, {message_bytes}]."
        )
        with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
            READERS[reader](messages, codec, 300)


@pytest.mark.parametrize("reader", READERS)
def test_readers_refuse_an_unresolved_element(reader: str) -> None:
    messages = encode(torch.ones(2, 300), CodecConfig(element="int8"))
    with pytest.raises(TypeError, match=re.escape(AUTO_TEXT)):
        READERS[reader](messages, CodecConfig(element="auto"), 300)


def test_messages_are_bytes_that_any_transport_takes() -> None:
    for codec in codecs((32, 512)):
        message = encode(torch.ones(2, 33), codec.values[0])
        assert message.dtype == torch.uint8
        assert message.is_contiguous()


def test_docstring_examples_run() -> None:
    results = doctest.testmod(codec_module)
    assert results.failed == 0
    assert results.attempted == 3
