"""Messages made of messages on a CUDA device: the bits of the reference on the CPU."""

import pytest
import torch

from lightning_taco.codec import accumulate, encode, recode_sum
from lightning_taco.config import CodecConfig
from tests.test_codec_recode import E4M3, INT4, INT8, STORED, adversarial, content, same_bits

pytestmark = pytest.mark.gpu
SIZES = [1, 127, 400, 70_001]


@pytest.mark.parametrize("num_values", SIZES)
@pytest.mark.parametrize(
    ("codec", "out_codec", "factor"),
    [(INT8, INT4, None), (INT4, INT8, 1 / 3), (INT8, INT8, 0.5), (E4M3, E4M3, None)],
    ids=str,
)
def test_recode_has_the_bits_of_the_reference(
    codec: CodecConfig, out_codec: CodecConfig, factor: float | None, num_values: int
) -> None:
    num_sources, num_rows = 3, 2
    values = adversarial(num_sources * num_rows, 400)[:, :num_values] if num_values <= 400 else None
    values = torch.randn(num_sources * num_rows, num_values) if values is None else values.contiguous()
    messages = encode(values, codec, seed=3).view(num_sources, num_rows, -1)
    expected = recode_sum(messages, codec, out_codec, num_values, factor=factor, seed=1 << 40)
    found = recode_sum(messages.cuda(), codec, out_codec, num_values, factor=factor, seed=1 << 40).cpu()
    assert same_bits(content(found, out_codec, num_values), content(expected, out_codec, num_values))


@pytest.mark.parametrize("num_values", SIZES)
@pytest.mark.parametrize("codec", STORED, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_accumulation_has_the_bits_of_the_reference(codec: CodecConfig, dtype: torch.dtype, num_values: int) -> None:
    values = adversarial(2, 400)[:, :num_values] if num_values <= 400 else torch.randn(2, num_values)
    first, second = values.to(dtype).contiguous().split(1)
    expected = encode(first, codec, seed=3)
    found = expected.cuda()
    for seed in (11, 12):
        accumulate(expected, second.reshape(-1), codec, seed=seed)
        accumulate(found, second.reshape(-1).cuda(), codec, seed=seed)
    assert same_bits(content(found.cpu(), codec, num_values), content(expected, codec, num_values))
