"""All elements, roundings and modes on a CUDA device: the bits of the reference on the CPU."""

import pytest
import torch

from lightning_taco.codec import decode, decode_sum, encode, requantize
from lightning_taco.config import CodecConfig
from tests.test_codec_family import PLAIN, SEED, adversarial, content, family
from tests.test_codec_reference import assert_same_bits

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("codec", family(block_size=128), ids=str)
def test_bits_of_the_reference(codec: CodecConfig, dtype: torch.dtype) -> None:
    for values in (torch.randn(3, 70_000), adversarial(300), torch.randn(2, 13)):
        values, num_values = values.to(dtype), values.shape[1]
        expected = encode(values, codec, seed=SEED)
        messages = encode(values.cuda(), codec, seed=SEED)
        assert_same_bits(content(messages, codec, num_values), content(expected, codec, num_values))
        device_messages = expected.cuda()
        assert_same_bits(decode(device_messages, codec, num_values, dtype), decode(expected, codec, num_values, dtype))
        total = decode_sum(device_messages, codec, num_values, dtype, average=True)
        assert_same_bits(total, decode_sum(expected, codec, num_values, dtype, average=True))
        again = requantize(device_messages, codec, num_values, seed=SEED)
        truth = requantize(expected, codec, num_values, seed=SEED)
        assert_same_bits(content(again, codec, num_values), content(truth, codec, num_values))


@pytest.mark.parametrize("element", ["int7", "int6", "int5", "int4", "int3"])
@pytest.mark.parametrize("block_size", [32, 64, 256, 512])
def test_packing_at_every_block_size(element: str, block_size: int) -> None:
    codec = CodecConfig(element=element, block_size=block_size)  # type: ignore[arg-type]
    values = torch.randn(2, 5000)
    expected = encode(values, codec)
    assert_same_bits(content(encode(values.cuda(), codec), codec, 5000), content(expected, codec, 5000))
    decoded = decode(expected.cuda(), codec, 5000, torch.float32)
    assert_same_bits(decoded, decode(expected, codec, 5000, torch.float32))


def test_blocks_of_2048() -> None:
    for codec in PLAIN:
        for values in (torch.randn(2, 70_000), adversarial(5000)):
            num_values = values.shape[1]
            expected = encode(values, codec, seed=SEED)
            messages = encode(values.cuda(), codec, seed=SEED)
            assert_same_bits(content(messages, codec, num_values), content(expected, codec, num_values))
            decoded = decode(expected.cuda(), codec, num_values, torch.float32)
            assert_same_bits(decoded, decode(expected, codec, num_values, torch.float32))


@pytest.mark.parametrize("mode", [{"levels": "gaussian"}, {"scale_mode": "fine"}], ids=str)
@pytest.mark.parametrize("block_size", [64, 256, 512])
def test_levels_and_fine_scales_at_every_block_size(mode: dict[str, str], block_size: int) -> None:
    codec = CodecConfig(element="int5", block_size=block_size, **mode)  # type: ignore[arg-type]
    values = torch.randn(2, 5000)
    expected = encode(values, codec)
    assert_same_bits(content(encode(values.cuda(), codec), codec, 5000), content(expected, codec, 5000))
    total = decode_sum(expected.cuda(), codec, 5000, torch.float32)
    assert_same_bits(total, decode_sum(expected, codec, 5000, torch.float32))
