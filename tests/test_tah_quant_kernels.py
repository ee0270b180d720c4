"""The kernels of TAH-Quant in Triton's interpreter: bit for bit what the torch reference gives.

As in `test_codec_kernels`, bf16 results are compared to within one unit in the last place here.
"""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lightning_taco.codec import TahQuant
from lightning_taco.codec.tah_quant_layout import TahQuantLayout, samples_tokens_channels
from lightning_taco.codec.tah_quant_reference import decode_reference, encode_reference
from lightning_taco.codec.token_entropy_reference import token_entropy_reference
from tests.test_codec_reference import assert_same_bits

pytest.importorskip("triton")
kernels = pytest.importorskip("lightning_taco.codec.kernels_tah_quant")
kernels_token_entropy = pytest.importorskip("lightning_taco.codec.kernels_token_entropy")

pytestmark = [
    pytest.mark.interpreter,
    # numpy, on which the interpreter runs, warns of the Inf and NaN that some inputs hold.
    pytest.mark.filterwarnings("ignore:(invalid value|overflow|divide by zero) encountered:RuntimeWarning"),
]
SEED = 123456789012345
CODECS = [
    TahQuant(),
    TahQuant(rotation="always", rounding="stochastic"),
    TahQuant(rotation="never", scale_format="float16", low_entropy_share=0.5),
    TahQuant(scale_format="float16", rounding="stochastic", low_entropy_share=0.0),
]
every_codec = pytest.mark.parametrize("codec", CODECS, ids=str)


def adversarial(*shape: int) -> Tensor:
    """Outlier channels, equal tokens, zero and constant tiles, lone values, ties, extremes, and values not finite."""
    values = torch.randn(shape)
    values[..., ::67] *= 30
    flat = values.view(-1, shape[-1])
    flat[0], flat[1], flat[2] = 0.0, -0.0, 1 / 3
    flat[3] = flat[4]
    flat[4, :64] = 0
    flat[4, 5] = -3.0
    flat[5] = torch.randint(-2, 3, (shape[-1],)).float()  # many equal magnitudes
    flat[6] *= 1e-30
    flat[7] *= 1e30
    flat[8, 3], flat[9, 64], flat[9, -1] = math.nan, math.inf, -math.inf
    flat[10] *= 1e37
    flat[10, 7] = 3e38
    flat[11] = 1000 + flat[11]
    flat[12] *= 1e-39
    return values


def content(message: Tensor, layout: TahQuantLayout) -> Tensor:
    """The message without what fills up its parts."""
    many = layout.num_tiles - layout.num_samples * layout.few_per_sample * layout.tiles_per_token
    sizes = (layout.num_samples * layout.map_row_bytes, layout.num_tiles, 4 * layout.num_tiles)
    sizes += (16 * layout.num_tiles, 8 * layout.num_tiles, 8 * many)
    starts = (0, layout.flags_offset, layout.ranges_offset, *layout.plane_offsets)
    return torch.cat([message[start : start + size] for start, size in zip(starts, sizes, strict=True)])


def assert_same(values: Tensor, codec: TahQuant, dtype: torch.dtype = torch.float32) -> None:
    layout = TahQuantLayout.of(tuple(values.shape), codec.low_entropy_share)
    expected = encode_reference(values.reshape(samples_tokens_channels(values.shape)), layout, codec, SEED)
    guarded = torch.full((layout.message_bytes + 128,), 255, dtype=torch.uint8)
    tokens = values.reshape(layout.num_tokens, layout.num_channels)
    kernels.encode_triton(tokens, layout, codec, guarded[64:-64], seed=SEED)
    assert (guarded[:64] == 255).all()
    assert (guarded[-64:] == 255).all()
    assert_same_bits(content(guarded[64:-64], layout), content(expected, layout))
    arriving = torch.full((layout.num_tokens + 2, layout.num_channels), 7.0, dtype=dtype)
    kernels.decode_triton(expected, layout, codec, arriving[1:-1])
    assert (arriving[0] == 7).all()
    assert (arriving[-1] == 7).all()
    truth = decode_reference(expected, layout, codec, dtype).view(arriving[1:-1].shape)
    if dtype != torch.bfloat16:
        assert_same_bits(arriving[1:-1], truth)
    else:  # truncated by the interpreter: at most one bf16 nearer to zero
        steps = truth.view(torch.int16).int() - arriving[1:-1].view(torch.int16).int()
        assert steps.min() >= 0
        assert steps.max() <= 1


@every_codec
@pytest.mark.parametrize("num_channels", [192, 131])
def test_bits_of_the_reference(codec: TahQuant, num_channels: int) -> None:
    assert_same(adversarial(2, 13, num_channels), codec)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    values = torch.randn(2, 9, 130).to(dtype)
    values[..., ::50] *= 20
    assert_same(values, TahQuant(), dtype)


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 5, 1), (3, 2, 65), (1, 70, 3), (2, 8, 64), (1, 2, 4200), (7, 63)])
def test_any_shape(shape: tuple[int, ...]) -> None:
    assert_same(torch.randn(shape), TahQuant())


def test_rows_with_gaps_and_no_values() -> None:
    wide = torch.randn(8, 200)
    assert_same(wide[::2, 7:137], TahQuant())
    for shape in [(0, 3, 64), (2, 0, 64), (2, 3, 0)]:
        assert_same(torch.empty(shape), TahQuant())


def test_entropies_have_the_bits_of_the_reference() -> None:
    for num_channels in (1, 2, 100, 4096, 4100):
        tokens = torch.randn(9, num_channels) * torch.rand(9, 1)
        tokens[1], tokens[2, 0], tokens[3, -1], tokens[4] = 0, math.nan, math.inf, 1e37
        keys = torch.full((9,), -1, dtype=torch.int32)
        kernels_token_entropy.entropy_kernel[(9,)](tokens, keys, num_channels, tokens.stride(0))
        assert_same_bits(keys.view(torch.float32), token_entropy_reference(tokens.unsqueeze(0))[0])


@pytest.mark.parametrize("few_per_sample", [0, 1, 7, 500, 4999, 5000])
def test_the_choice_is_that_of_a_stable_sort(few_per_sample: int) -> None:
    """Over several chunks of tokens, with many ties."""
    keys = torch.randint(0, 40, (2, 5000)).float().sqrt().view(torch.int32)
    keys[1, 100:3000] = keys[1, 0]
    keys[0, ::7] = 0x7F800000
    map_row_bytes = 625
    message, slots = torch.full((2 * 625,), 170, dtype=torch.uint8), torch.full((2, 5000), -2, dtype=torch.int32)
    kernels_token_entropy.choose_kernel[(2,)](keys, message, slots, 5000, few_per_sample, map_row_bytes, 2048)
    is_few = torch.zeros(2, 5000, dtype=torch.bool)
    is_few.scatter_(1, keys.argsort(dim=1, stable=True)[:, :few_per_sample], True)
    expected = torch.where(is_few, -1, (~is_few).view(-1).int().cumsum(0).view(2, 5000) - 1)
    assert torch.equal(slots, expected.int())
    assert torch.equal((message.unsqueeze(1) >> torch.arange(8) & 1).view(2, 5000) == 1, is_few)
    again = torch.full_like(slots, -2)
    kernels_token_entropy.slots_kernel[(2,)](message, again, 5000, few_per_sample, map_row_bytes, 2048)
    assert torch.equal(again, slots)


def test_the_compiler_takes_what_the_interpreter_takes(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, "-m", "tests.front_end"]
    outcome = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250)
    assert outcome.stdout == "lowered\n", outcome.stderr[-3000:]
