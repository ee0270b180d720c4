"""Messages made of messages: the reference against what it should be, and the kernels bit for bit against it."""

import math

import pytest
import torch
from torch import Tensor

from lightning_taco.codec import MessageLayout, accumulate, decode, decode_sum, encode, recode_sum
from lightning_taco.codec.recode_reference import accumulate_reference, recode_sum_reference
from lightning_taco.config import BITS_PER_CODE, CodecConfig

INT8 = CodecConfig(rounding="stochastic")
INT4 = CodecConfig(element="int4", rounding="stochastic")
INT5 = CodecConfig(element="int5")
"""Whose tiles are held in more parts than those of the others."""
E4M3 = CodecConfig(element="e4m3", rotation=False)
STORED = [E4M3, INT8, CodecConfig(element="int8", rotation=False, rounding="stochastic"), CodecConfig(element="int6")]
names = pytest.mark.parametrize("codec", STORED, ids=str)


def adversarial(num_rows: int, num_values: int) -> Tensor:
    """Gaussian values with a block of zeros, a tiny and a huge one, outliers, and one NaN and one Inf at the end."""
    values = torch.randn(num_rows, num_values)
    values[0, :128] = 0.0
    values[0, 128:256] *= 1e-30
    values[-1, 128:256] *= 1e30
    values[0, 300::64] *= 50
    values[-1, -1], values[0, -1] = math.nan, math.inf
    return values


def same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def content(message: Tensor, codec: CodecConfig, num_values: int) -> Tensor:
    """The message without its padding, which has no defined content, and with one bit pattern for NaN."""
    layout = MessageLayout.of(num_values, codec)
    scales = message.view(torch.float32)[:, layout.scale_offset_bytes // 4 :][:, : layout.num_blocks]
    codes = message[:, : layout.num_blocks * codec.block_size * BITS_PER_CODE[codec.element] // 8]
    return torch.cat([codes, scales.nan_to_num(nan=-1.0).contiguous().view(torch.uint8)], dim=1)


def test_the_sum_of_one_codec_in_another() -> None:
    """8 bits in, 4 bits out: the error is that of the 4 bits, and the factor is applied once."""
    values = torch.randn(4, 3, 1000)
    messages = torch.stack([encode(each, INT8, seed=i) for i, each in enumerate(values)])
    sums = recode_sum(messages, INT8, INT4, 1000, factor=0.25, seed=7)
    exact = values.mean(dim=0)
    error = (decode(sums, INT4, 1000, torch.float32) - exact).norm() / exact.norm()
    assert 0.12 < error < 0.19  # stochastic rounding to 4 bits has 16.6% on Gaussian values
    fine = recode_sum(messages, INT8, INT8, 1000, factor=0.25)
    assert (decode(fine, INT8, 1000, torch.float32) - exact).norm() / exact.norm() < 0.02


def test_a_factor_takes_the_place_of_the_average() -> None:
    messages = torch.cat([encode(torch.ones(1, 256), CodecConfig()) for _ in range(3)])
    assert decode_sum(messages, CodecConfig(), 256, torch.float32, factor=0.5).sub(1.5).abs().max() < 1e-5
    average = decode_sum(messages, CodecConfig(), 256, torch.float32, average=True)
    assert same_bits(average, decode_sum(messages, CodecConfig(), 256, torch.float32, factor=1.0 / 3))
    with pytest.raises(ValueError, match=r"average=True and factor=0\.5 were both given"):
        decode_sum(messages, CodecConfig(), 256, torch.float32, average=True, factor=0.5)


@names
def test_accumulation_stays_close(codec: CodecConfig) -> None:
    """Eight gradients into one message: within what eight roundings may cost, unbiased or not."""
    gradients = torch.randn(8, 1000)
    message = encode(gradients[:1], codec)
    for step, gradient in enumerate(gradients[1:]):
        assert accumulate(message, gradient, codec, seed=step) is message
    total = gradients.sum(dim=0)
    error = (decode(message, codec, 1000, torch.float32)[0] - total).norm() / total.norm()
    assert error < {"e4m3": 0.06, "int8": 0.03, "int6": 0.06}[codec.element]


def test_nonfinite_values_stay_nonfinite() -> None:
    message = encode(torch.ones(1, 300), E4M3)
    gradient = torch.ones(300)
    gradient[130] = math.nan
    accumulate(message, gradient, E4M3)
    accumulate(message, torch.ones(300), E4M3)
    values = decode(message, E4M3, 300, torch.float32)[0]
    assert values[128:256].isnan().all()
    assert values[:128].eq(3).all()
    assert values[256:].eq(3).all()


@pytest.mark.parametrize(
    ("out_codec", "text"),
    [
        (CodecConfig(block_size=64), "give both the same block_size and the same rotation"),
        (CodecConfig(rotation=False), "give both the same block_size and the same rotation"),
        (CodecConfig(scale_mode="dual"), "scale_mode='dual' cannot be added up here"),
    ],
)
def test_codecs_of_other_domains_are_refused(out_codec: CodecConfig, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        recode_sum(encode(torch.ones(1, 10), CodecConfig()).unsqueeze(0), CodecConfig(), out_codec, 10)


def test_bad_input_is_refused_in_words() -> None:
    message = encode(torch.ones(1, 10), INT8)
    with pytest.raises(ValueError, match=r"need uint8 \[sources, rows, 144\]"):
        recode_sum(message, INT8, INT4, 10)
    buffer = torch.zeros(160, dtype=torch.uint8)
    with pytest.raises(ValueError, match="messages begins 3 bytes after a multiple of 4"):
        recode_sum(buffer[3:147].view(1, 1, 144), INT8, INT4, 10)
    with pytest.raises(ValueError, match="message begins 2 bytes"):
        accumulate(buffer[2:146].view(1, 144), torch.ones(10), INT8)
    with pytest.raises(ValueError, match="at least one source"):
        recode_sum(message.unsqueeze(0)[:0], INT8, INT4, 10)
    with pytest.raises(ValueError, match="seed=-1 is out of range"):
        accumulate(message, torch.ones(10), INT8, seed=-1)
    with pytest.raises(ValueError, match=r"values.reshape\(-1\)"):
        accumulate(message, torch.ones(2, 5), INT8)
    with pytest.raises(TypeError, match="float64"):
        accumulate(message, torch.ones(10).double(), INT8)
    with pytest.raises(ValueError, match=r"uint8 \[1, 144\]"):
        accumulate(message[:, :16], torch.ones(10), INT8)


@pytest.mark.interpreter
@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")
@pytest.mark.parametrize(
    ("codec", "out_codec", "factor"),
    [(INT8, INT4, None), (INT4, INT8, 1 / 3), (E4M3, E4M3, None), (INT8, INT5, None), (INT5, INT8, None)],
    ids=str,
)
def test_recode_kernel_gives_the_bits_of_the_reference(
    codec: CodecConfig, out_codec: CodecConfig, factor: float | None
) -> None:
    kernels = pytest.importorskip("lightning_taco.codec.kernels_recode")
    for num_sources, num_rows, num_values in [(3, 2, 400), (1, 1, 1), (2, 1, 8192)]:
        values = adversarial(num_sources * num_rows, num_values) if num_values > 300 else None
        values = torch.randn(num_sources * num_rows, num_values) if values is None else values
        messages = encode(values, codec, seed=3).view(num_sources, num_rows, -1)
        expected = recode_sum_reference(messages, codec, out_codec, num_values, factor=factor, seed=1 << 40)
        poisoned = torch.full_like(expected, 255)
        kernels.recode_sum_triton(messages, codec, out_codec, num_values, factor=factor, seed=1 << 40, out=poisoned)
        assert same_bits(content(poisoned, out_codec, num_values), content(expected, out_codec, num_values))


@pytest.mark.interpreter
@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")
@names
@pytest.mark.parametrize("num_values", [1, 400])
def test_accumulate_kernel_gives_the_bits_of_the_reference(codec: CodecConfig, num_values: int) -> None:
    kernels = pytest.importorskip("lightning_taco.codec.kernels_recode")
    values = adversarial(2, num_values) if num_values > 300 else torch.randn(2, num_values)
    message = encode(values[:1], codec, seed=3)
    expected = accumulate_reference(message, values[1], codec, seed=11)
    kernels.accumulate_triton(message, values[1], codec, seed=11)
    assert same_bits(content(message, codec, num_values), content(expected, codec, num_values))
