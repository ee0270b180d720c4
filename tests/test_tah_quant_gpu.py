"""TAH-Quant and fixed point on a CUDA device: the bits of the reference on the CPU."""

import pytest
import torch

from lightning_taco.codec import FixedPoint, TahQuant
from lightning_taco.codec.tah_quant_layout import TahQuantLayout
from tests.test_codec_reference import assert_same_bits
from tests.test_tah_quant_kernels import CODECS, SEED, adversarial, content

pytestmark = pytest.mark.gpu
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("num_channels", [192, 131, 2560, 5000])
def test_bits_of_the_reference(codec: TahQuant, num_channels: int) -> None:
    for values in (adversarial(2, 13, num_channels), torch.randn(3, 2500, 40), torch.randn(1, 1, num_channels)):
        for dtype in DTYPES:
            values = values.to(dtype)
            layout = TahQuantLayout.of(tuple(values.shape), codec.low_entropy_share)
            expected = codec.encode(values, seed=SEED)
            assert_same_bits(content(codec.encode(values.cuda(), seed=SEED), layout), content(expected, layout))
            decoded = codec.decode(expected.cuda(), values.shape, dtype)
            assert_same_bits(decoded, codec.decode(expected, values.shape, dtype))


@pytest.mark.parametrize("bits", [6, 7, 8])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_fixed_point_has_the_bits_of_the_reference(bits: int, rounding: str) -> None:
    codec = FixedPoint(bits=bits, rounding=rounding)  # type: ignore[arg-type]
    for dtype in DTYPES:
        values = adversarial(2, 13, 200).to(dtype)
        expected = codec.encode(values, seed=SEED)
        used = codec.codec.bits_per_value * values.numel() // 8  # nothing fills up between codes and scales here
        assert torch.equal(codec.encode(values.cuda(), seed=SEED).cpu()[: int(used)], expected[: int(used)])
        assert_same_bits(
            codec.decode(expected.cuda(), values.shape, dtype), codec.decode(expected, values.shape, dtype)
        )


def test_strided_tensors_and_many_tokens() -> None:
    values = torch.randn(64, 4100, 70, device="cuda", dtype=torch.bfloat16)
    for codec in (TahQuant(), FixedPoint(bits=7)):
        for view in (values.transpose(0, 1), values[::7, 5:, 3:67], values[:1]):
            message = codec.encode(view)
            assert message.numel() == codec.message_bytes(view.shape, view.dtype)
            on_cpu = codec.decode(codec.encode(view.cpu()), view.shape, view.dtype)
            assert_same_bits(codec.decode(message, view.shape, view.dtype), on_cpu)
