"""The Triton kernels in Triton's interpreter on CPU: bit for bit what the torch reference gives.

The interpreter truncates casts to bf16 where a GPU rounds to nearest, so bf16 results are compared to within one
unit in the last place here, and bit for bit in `test_codec_gpu`; and its own casts to FP8 are wrong, which is why the
kernels round E4M3 by integer arithmetic here (and on GPUs that have no FP8).
"""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_taco.codec.constants import THREADS_PER_PROGRAM
from lightning_taco.codec.layout import MessageLayout
from lightning_taco.codec.reference import (
    decode_reference,
    decode_sum_reference,
    encode_reference,
    requantize_reference,
)
from lightning_taco.config import BLOCK_SIZES, CodecConfig
from tests.test_codec_reference import (
    MODES,
    adversarial_row,
    assert_same_bits,
    codecs,
    content,
    e4m3_table,
    sample,
)

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
kernels = pytest.importorskip("lightning_taco.codec.kernels")
kernels_numbers = pytest.importorskip("lightning_taco.codec.kernels_numbers")

pytestmark = [
    pytest.mark.interpreter,
    # numpy, on which the interpreter runs, warns of the Inf and NaN that some inputs hold.
    pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning"),
]

GUARD_BYTES = 64


class Guarded:
    """A poisoned buffer with a border, to show what was left unwritten and what was written outside."""

    def __init__(self, rows: int, columns: int, dtype: torch.dtype) -> None:
        self.poison = 255 if dtype == torch.uint8 else math.nan
        self.num_guards = GUARD_BYTES // dtype.itemsize
        self.buffer = torch.full((2 * self.num_guards + rows * columns,), self.poison, dtype=dtype)
        self.inner = self.buffer[self.num_guards : self.num_guards + rows * columns].view(rows, columns)

    def checked(self) -> Tensor:
        """The inside, after a look at the border."""
        border = torch.cat((self.buffer[: self.num_guards], self.buffer[-self.num_guards :]))
        untouched = border == 255 if border.dtype == torch.uint8 else border.isnan()
        assert untouched.all(), "written outside of the buffer"
        return self.inner


def encoded(values: Tensor, codec: CodecConfig) -> Tensor:
    out = Guarded(values.shape[0], MessageLayout.of(values.shape[1], codec).message_bytes, torch.uint8)
    kernels.encode_triton(values, codec, out.inner)
    return out.checked()


def decoded(messages: Tensor, codec: CodecConfig, num_values: int, dtype: torch.dtype = torch.float32) -> Tensor:
    out = Guarded(messages.shape[0], num_values, dtype)
    kernels.decode_triton(messages, codec, out.inner)
    return out.checked()


def decoded_sum(messages: Tensor, codec: CodecConfig, num_values: int, average: bool) -> Tensor:
    out = Guarded(1, num_values, torch.float32)
    kernels.decode_triton(messages, codec, out.inner, num_sources=messages.shape[0], average=average)
    return out.checked()[0]


def requantized(messages: Tensor, codec: CodecConfig, num_values: int, average: bool) -> Tensor:
    out = Guarded(1, messages.shape[1], torch.uint8)
    kernels.requantize_triton(messages, codec, num_values, out.inner, average=average)
    return out.checked()


def assert_same_message(actual: Tensor, expected: Tensor, codec: CodecConfig, num_values: int) -> None:
    assert_same_bits(content(actual, codec, num_values), content(expected, codec, num_values))


# The helpers that round.


@triton.jit
def round_kernel(
    values_ptr,
    codes_ptr,
    num_values,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    LARGEST: tl.constexpr,
    SIZE: tl.constexpr,
):
    offsets = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    values = tl.load(values_ptr + offsets, mask=offsets < num_values, other=0.0)
    codes = kernels_numbers._float_code(values, values, MANTISSA, BIAS, LARGEST, False)
    tl.store(codes_ptr + offsets, codes, mask=offsets < num_values)


@triton.jit
def value_kernel(codes_ptr, values_ptr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, SIZE: tl.constexpr):
    offsets = tl.arange(0, SIZE)
    tl.store(values_ptr + offsets, kernels_numbers._float_value(tl.load(codes_ptr + offsets), MANTISSA, BIAS))


def rounding_cases() -> Tensor:
    """Every E4M3 value, every midpoint between neighbours, both one unit in the last place either side, and more."""
    grid = e4m3_table()[:127]
    midpoints = (grid[1:] + grid[:-1]) / 2
    points = torch.cat((grid, midpoints))
    above = torch.nextafter(points, torch.tensor(torch.inf))
    below = torch.nextafter(points[1:], torch.tensor(-torch.inf))
    exponents = torch.arange(-149.0, 9.0)
    magnitudes = torch.cat(
        (
            points,
            above,
            below,
            2.0**exponents,
            torch.nextafter(2.0**exponents, torch.tensor(0.0)),
            448 * torch.rand(2000),
            2.0 ** -(20 * torch.rand(2000)),
            torch.tensor([448 * (1 + 2.0**-22), 2.0**-10, 3 * 2.0**-11]),
        )
    )
    return torch.cat((magnitudes, -magnitudes))


def test_integer_rounding_to_e4m3_is_to_nearest_even() -> None:
    values = rounding_cases()
    assert len(values) > 8000
    codes = torch.full((len(values),), 255, dtype=torch.uint8)
    round_kernel[(triton.cdiv(len(values), 4096),)](values, codes, len(values), 3, 7, 0x7E, SIZE=4096)
    assert_same_bits(codes, values.to(torch.float8_e4m3fn).view(torch.uint8))
    # And without torch's cast: the nearest value in float64, a tie to the even code.
    distance = (values.double().abs().unsqueeze(1) - e4m3_table()[:127].double()).abs()
    nearest = distance == distance.amin(1, keepdim=True)
    expected = torch.where(nearest, torch.arange(127) % 2, 2).argmin(1)
    assert torch.equal(codes.long() & 127, expected)
    assert torch.equal(codes >= 128, values.signbit())


def test_integer_decoding_of_e4m3_is_exact() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    values = torch.full((256,), math.nan)
    value_kernel[(1,)](codes, values, 3, 7, SIZE=256)
    finite = (codes & 127) != 127
    assert finite.sum() == 254
    assert_same_bits(values[finite], e4m3_table()[finite])
    assert_same_bits(values[finite], codes.view(torch.float8_e4m3fn).float()[finite])


# The kernels.


def each_pair() -> list[Any]:
    """Block 128, which recipes use, in both elements and all modes; of the others each pair of element, block, mode."""
    every = codecs(BLOCK_SIZES)  # an odd number of block sizes and of modes: every second one has all pairs
    return [case for place, case in enumerate(every) if place % 2 == 0 or case.values[0].block_size == 128]


@pytest.mark.parametrize("codec", each_pair())
def test_kernels_equal_the_reference(codec: CodecConfig) -> None:
    num_values = {32: 300, 64: 333, 128: 300, 256: 515, 512: 1025}[codec.block_size]
    values = sample("student_t3", 2, num_values)
    values[1, : codec.block_size] = 0
    messages = encode_reference(values, codec)
    assert_same_message(encoded(values, codec), messages, codec, num_values)
    assert_same_bits(decoded(messages, codec, num_values), decode_reference(messages, codec, num_values, torch.float32))
    average = codec.element == "int8"
    total = decode_sum_reference(messages, codec, num_values, torch.float32, average=average)
    assert_same_bits(decoded_sum(messages, codec, num_values, average), total)
    again = requantize_reference(messages, codec, num_values, average=not average)
    assert_same_message(requantized(messages, codec, num_values, not average), again, codec, num_values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("codec", codecs((64,)))
def test_adversarial_values(codec: CodecConfig, dtype: torch.dtype) -> None:
    values = adversarial_row(dtype, codec.block_size)
    num_values = values.shape[1]
    messages = encode_reference(values, codec)
    assert_same_message(encoded(values, codec), messages, codec, num_values)
    if dtype == torch.float32:
        expected = decode_reference(messages, codec, num_values, dtype)
        assert_same_bits(decoded(messages, codec, num_values), expected)
        # Added to the same values in another order: Inf - Inf, huge + tiny, and so on.
        rows = torch.cat((messages, encode_reference(values.flip(1), codec)))
        again = requantize_reference(rows, codec, num_values)
        assert_same_message(requantized(rows, codec, num_values, False), again, codec, num_values)


def rows_of_width(num_values: int) -> Tensor:
    """One to three rows, of which the second is zero."""
    num_rows = {0: 3, 15: 2}.get(num_values % 30, 1)
    values = sample("gauss", 3, num_values, seed=num_values)[:num_rows]
    values[1:2] = 0
    return values


@pytest.mark.parametrize("start", range(1, 121, 60))
def test_every_width(start: int) -> None:
    # The setting that costs least in the interpreter: what is tried here is the handling of bounds.
    codec = CodecConfig(element="int8", block_size=32, rotation=False)
    for num_values in range(start, start + 60):
        values = rows_of_width(num_values)
        messages = encode_reference(values, codec)
        assert_same_message(encoded(values, codec), messages, codec, num_values)
        expected = decode_reference(messages, codec, num_values, torch.float32)
        assert_same_bits(decoded(messages, codec, num_values), expected)


@pytest.mark.parametrize("num_values", [1, 13, 127, 129, 4096, 4097, 9001])
@pytest.mark.parametrize("mode", ["plain", "dual"])
def test_some_widths_and_several_programs(mode: str, num_values: int) -> None:
    codec = CodecConfig(element="e4m3", block_size=128, **MODES[mode])
    values = sample("gauss", 2, num_values)
    values[0] = 0
    messages = encode_reference(values, codec)
    assert_same_message(encoded(values, codec), messages, codec, num_values)
    expected = decode_reference(messages, codec, num_values, torch.float32)
    assert_same_bits(decoded(messages, codec, num_values), expected)


@pytest.mark.parametrize(
    "codec",
    [
        CodecConfig(element="int8"),
        CodecConfig(element="e4m3", scale_mode="dual"),
        CodecConfig(element="int8", scale_mode="fine"),
        CodecConfig(element="int5", levels="gaussian", rounding="stochastic"),
        CodecConfig(element="int4", block_size=512),
        CodecConfig(element="fp4", block_size=64, rotation=False),
    ],
    ids=str,
)
def test_rows_of_whole_tiles_which_have_kernels_without_masks(codec: CodecConfig) -> None:
    tile = kernels.constants_of(codec, torch.device("cpu"), 1)
    num_values = 2 * tile.tile * tile.block_size
    assert kernels.constants_of(codec, torch.device("cpu"), num_values).is_whole
    assert not tile.is_whole
    values = sample("scale_mixture", 2, num_values)
    values[1, 700] = math.nan
    messages = encode_reference(values, codec)
    assert_same_message(encoded(values, codec), messages, codec, num_values)
    expected = decode_reference(messages, codec, num_values, torch.float32)
    assert_same_bits(decoded(messages, codec, num_values), expected)
    total = decode_sum_reference(messages, codec, num_values, torch.float32)
    assert_same_bits(decoded_sum(messages, codec, num_values, False), total)
    again = requantize_reference(messages, codec, num_values)
    assert_same_message(requantized(messages, codec, num_values, False), again, codec, num_values)


def test_a_tile_holds_what_its_codes_and_threads_need() -> None:
    """Values that share a byte lie in different parts, and a part is what a warp reads at once at most."""
    for parameter in codecs(BLOCK_SIZES):
        (codec,) = parameter.values
        tile = kernels.constants_of(codec, torch.device("cpu"), 1)
        assert tile.parts * tile.width == codec.block_size
        narrowest = min(width for width in (8, 4, 2, 1) if tile.bits & width)
        assert tile.parts % (8 // narrowest) == 0
        threads = tile.tile * tile.width // tile.lane_values
        assert threads == THREADS_PER_PROGRAM
        assert tile.width <= 32 * tile.lane_values


@pytest.mark.parametrize("num_sources", [1, 3, 8])
@pytest.mark.parametrize("average", [False, True])
def test_sums_of_several_sources(num_sources: int, average: bool) -> None:
    codec = CodecConfig(element="e4m3", block_size=64)
    messages = encode_reference(sample("scale_mixture", num_sources, 200), codec)
    total = decode_sum_reference(messages, codec, 200, torch.float32, average=average)
    assert_same_bits(decoded_sum(messages, codec, 200, average), total)
    again = requantize_reference(messages, codec, 200, average=average)
    assert_same_message(requantized(messages, codec, 200, average), again, codec, 200)


def test_several_groups_of_sources_in_one_launch() -> None:
    codec = CodecConfig(element="int8", block_size=32)
    messages = encode_reference(sample("gauss", 6, 100), codec)
    out = Guarded(2, 100, torch.float32)
    kernels.decode_triton(messages, codec, out.inner, num_sources=3)
    for group in range(2):
        total = decode_sum_reference(messages[3 * group :][:3], codec, 100, torch.float32)
        assert_same_bits(out.checked()[group], total)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mode", ["plain", "rotated"])
def test_results_in_half_precision(mode: str, dtype: torch.dtype) -> None:
    codec = CodecConfig(element="e4m3", block_size=64, **MODES[mode])
    messages = encode_reference(sample("gauss", 2, 150), codec)
    actual = decoded(messages, codec, 150, dtype)
    expected = decode_reference(messages, codec, 150, dtype)
    if dtype == torch.float16:
        assert_same_bits(actual, expected)
    else:  # truncated by the interpreter: at most one bf16 nearer to zero
        steps = expected.view(torch.int16).int() - actual.view(torch.int16).int()
        assert steps.min() >= 0
        assert steps.max() <= 1


def test_strided_rows() -> None:
    codec = CodecConfig(element="e4m3", block_size=32)
    base = sample("gauss", 6, 128)
    for values in (base[::2, 3:103], base[:1, :100].expand(3, 100), base[1:4, :100]):
        messages = encode_reference(values, codec)
        assert_same_message(encoded(values, codec), messages, codec, 100)
    wide = torch.full((4, 130), math.nan)
    rows = wide[1:4, 5:105]
    kernels.decode_triton(messages, codec, rows)
    assert_same_bits(rows, decode_reference(messages, codec, 100, torch.float32))
    rows.fill_(math.nan)
    assert wide.isnan().all(), "written outside of the rows"


def test_no_values_and_no_rows() -> None:
    codec = CodecConfig(element="e4m3", block_size=32, scale_mode="dual")
    for num_rows, num_values in ((3, 0), (0, 100), (0, 0)):
        values = torch.ones(num_rows, num_values)
        assert encoded(values, codec).numel() == 0
        messages = torch.zeros(num_rows, MessageLayout.of(num_values, codec).message_bytes, dtype=torch.uint8)
        assert decoded(messages, codec, num_values).shape == (num_rows, num_values)
    assert requantized(torch.zeros(3, 0, dtype=torch.uint8), codec, 0, False).shape == (1, 0)
