"""The compiled kernels on a CUDA device: bit for bit what the torch reference gives on CPU, in one launch each.

Most of the time goes into compiling kernels, about a second a variant; several minutes in all.
"""

import math
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from lightning_taco import _compat
from lightning_taco.codec import MessageLayout, decode, decode_sum, encode, requantize
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

pytestmark = pytest.mark.gpu

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
NUM_SOURCES = 3


def rows_of(dtype: torch.dtype, block_size: int) -> Tensor:
    """Three rows of one length that end in a short block: adversarial, heavy-tailed, and adversarial backwards."""
    adversarial = adversarial_row(dtype, block_size)
    heavy = sample("scale_mixture", 1, adversarial.shape[1]).to(dtype)
    return torch.cat((adversarial, heavy, adversarial.flip(1)))


def assert_same_message(actual: Tensor, expected: Tensor, codec: CodecConfig, num_values: int) -> None:
    assert_same_bits(content(actual, codec, num_values), content(expected, codec, num_values))


def assert_agrees(values: Tensor, codec: CodecConfig, out_dtype: torch.dtype) -> None:
    """All four functions on the device against the reference on CPU; `values` ``[R, N]`` on CPU."""
    num_values = values.shape[1]
    messages = encode_reference(values, codec)
    assert_same_message(encode(values.cuda(), codec), messages, codec, num_values)
    on_device = messages.cuda()
    assert_same_bits(
        decode(on_device, codec, num_values, out_dtype),
        decode_reference(messages, codec, num_values, out_dtype),
    )
    assert_same_bits(
        decode_sum(on_device, codec, num_values, out_dtype, average=True),
        decode_sum_reference(messages, codec, num_values, out_dtype, average=True),
    )
    again = requantize_reference(messages, codec, num_values)
    assert_same_message(requantize(on_device, codec, num_values), again, codec, num_values)


@pytest.mark.parametrize("codec", codecs(BLOCK_SIZES))
def test_kernels_equal_the_reference(codec: CodecConfig) -> None:
    assert_agrees(rows_of(torch.float32, codec.block_size), codec, torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("codec", codecs((128,)))
def test_half_precision_in_and_out(codec: CodecConfig, dtype: torch.dtype) -> None:
    assert_agrees(rows_of(dtype, codec.block_size), codec, dtype)


@pytest.mark.parametrize("name", ["gauss", "student_t3", "outlier_channels", "off_centre"])
@pytest.mark.parametrize("element", ["e4m3", "int8"])
def test_a_million_values(element: str, name: str) -> None:
    values = sample(name, NUM_SOURCES, 2**20 + 77).bfloat16()
    assert_agrees(values, CodecConfig(element=element), torch.bfloat16)


def every_rounding() -> Tensor:
    """One row of blocks of 128 whose largest value is 448: every E4M3 value and midpoint, and one ulp either side."""
    grid = e4m3_table()[:127]
    points = torch.cat((grid, (grid[1:] + grid[:-1]) / 2))
    above = torch.nextafter(points, torch.tensor(math.inf)).clamp_max(448)
    below = torch.nextafter(points, torch.tensor(-math.inf)).clamp_min(-448)
    cases = torch.cat((points, above, below, 448 * torch.rand(20_000), 2.0 ** -(14 * torch.rand(20_000))))
    cases = torch.cat((cases, -cases))
    cases = torch.nn.functional.pad(cases, (0, -len(cases) % 127)).view(-1, 127)
    return torch.cat((torch.full((len(cases), 1), 448.0), cases), 1).view(1, -1)


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_fp8_hardware_and_integer_rounding_give_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, mode: str, native: bool
) -> None:
    from lightning_taco.codec import kernels

    codec = CodecConfig(element="e4m3", **MODES[mode])
    device = torch.device("cuda", torch.cuda.current_device())
    if native and not _compat.supports_fp8(device):
        pytest.skip("this device has no FP8")
    if not native:
        monkeypatch.setattr(_compat, "supports_fp8", lambda device: False)
    assert kernels.constants_of(codec, device).is_native_fp8 is native
    values = every_rounding()
    messages = encode_reference(values, codec)
    if not codec.rotation:
        codes = messages[0, : values.shape[1]].long()
        assert len(codes.unique()) == 254, "not every code is tried"
    assert_agrees(values, codec, torch.float32)
    assert_agrees(rows_of(torch.float32, 128), codec, torch.float32)


@pytest.mark.parametrize(
    "codec",
    [
        CodecConfig(element="e4m3", block_size=32),
        CodecConfig(element="int8", block_size=64, scale_mode="dual"),
        CodecConfig(element="e4m3", rotation=False),
    ],
    ids=str,
)
def test_every_width(codec: CodecConfig) -> None:
    cases, results = [], []
    for num_values in range(1, 301):
        values = sample("student_t3", 3, num_values, seed=num_values)[: 1 + num_values % 3]
        values[1:2] = 0
        cases.append(values)
        messages = encode(values.cuda(), codec)
        results.append((messages, decode(messages, codec, num_values, torch.float32)))
    for values, (messages, decoded) in zip(cases, results, strict=True):
        num_values = values.shape[1]
        expected = encode_reference(values, codec)
        assert_same_message(messages, expected, codec, num_values)
        assert_same_bits(decoded, decode_reference(expected, codec, num_values, torch.float32))


@pytest.mark.parametrize("num_sources", [1, 2, 8])
def test_numbers_of_sources(num_sources: int) -> None:
    codec = CodecConfig(element="e4m3")
    values = sample("scale_mixture", num_sources, 5000)
    for average in (False, True):
        messages = encode_reference(values, codec)
        assert_same_bits(
            decode_sum(messages.cuda(), codec, 5000, torch.float32, average=average),
            decode_sum_reference(messages, codec, 5000, torch.float32, average=average),
        )
        again = requantize_reference(messages, codec, 5000, average=average)
        assert_same_message(requantize(messages.cuda(), codec, 5000, average=average), again, codec, 5000)


def test_strided_input() -> None:
    codec = CodecConfig(element="e4m3", block_size=32)
    base = sample("gauss", 6, 700)
    for view in (
        lambda base: base[:, 3:303],
        lambda base: base[::2, :300],
        lambda base: base[:, ::2],
        lambda base: base.t()[:300],
        lambda base: base[:1, :300].expand(4, 300),
        lambda base: base[:, :1].expand(6, 300),
    ):
        values = view(base)
        expected = encode_reference(values, codec)
        assert_same_message(encode(view(base.cuda()), codec), expected, codec, values.shape[1])


def test_no_values_and_no_rows() -> None:
    codec = CodecConfig(element="e4m3")
    for num_rows, num_values in ((3, 0), (0, 300), (0, 0)):
        messages = encode(torch.ones(num_rows, num_values, device="cuda"), codec)
        assert messages.shape == (num_rows, MessageLayout.of(num_values, codec).message_bytes)
        assert decode(messages, codec, num_values, torch.float16).shape == (num_rows, num_values)
    none = torch.zeros(3, 0, dtype=torch.uint8, device="cuda")
    assert decode_sum(none, codec, 0, torch.float32, average=True).shape == (0,)
    assert requantize(none, codec, 0).shape == (1, 0)


@pytest.mark.parametrize("codec", codecs((64,)))
def test_out_buffers_are_filled_and_nothing_else_is(codec: CodecConfig) -> None:
    values = sample("gauss", 3, 301)
    expected = encode_reference(values, codec)
    message_bytes = expected.shape[1]
    buffer = torch.full((5 * message_bytes,), 255, dtype=torch.uint8, device="cuda")
    out = buffer[message_bytes : 4 * message_bytes].view(3, message_bytes)
    assert encode(values.cuda(), codec, out=out).data_ptr() == out.data_ptr()
    assert_same_message(out, expected, codec, 301)
    messages = expected.cuda()
    out.fill_(255)
    one = out[1:2]
    assert requantize(messages, codec, 301, out=one).data_ptr() == one.data_ptr()
    assert_same_message(one, requantize_reference(expected, codec, 301), codec, 301)
    out.fill_(255)
    assert (buffer == 255).all(), "written outside of out"
    for dtype in DTYPES:
        floats = torch.full((5, 320), math.nan, dtype=dtype, device="cuda")
        rows = floats[1:4, 7:308]
        assert decode(messages, codec, 301, dtype, out=rows).data_ptr() == rows.data_ptr()
        assert_same_bits(rows, decode_reference(expected, codec, 301, dtype))
        rows.fill_(math.nan)
        total = floats.view(-1)[16 : 16 + 301]
        assert decode_sum(messages, codec, 301, dtype, out=total).data_ptr() == total.data_ptr()
        assert_same_bits(total, decode_sum_reference(expected, codec, 301, dtype))
        total.fill_(math.nan)
        assert floats.isnan().all(), "written outside of out"


@pytest.mark.parametrize("codec", codecs((128,)))
def test_the_reference_gives_the_same_bits_on_the_device(monkeypatch: pytest.MonkeyPatch, codec: CodecConfig) -> None:
    monkeypatch.setattr(_compat, "has_triton", lambda: False)
    assert_agrees(rows_of(torch.float32, 128), codec, torch.float32)
    assert_agrees(rows_of(torch.bfloat16, 128), codec, torch.bfloat16)


# How the kernels run.


def calls(codec: CodecConfig) -> dict[str, Callable[[], Tensor]]:
    """The four functions by the name of their kernel, with everything prepared that a call does not pay for."""
    values = sample("gauss", NUM_SOURCES, 2**16 + 5).bfloat16().cuda()
    num_values = values.shape[1]
    messages = encode(values, codec)
    return {
        "encode_kernel": lambda: encode(values, codec),
        "decode_kernel": lambda: decode(messages, codec, num_values, torch.bfloat16),
        "decode_kernel of a sum": lambda: decode_sum(messages, codec, num_values, torch.bfloat16, average=True),
        "requantize_kernel": lambda: requantize(messages, codec, num_values),
    }


# What the profiler itself adds.
PROFILER_EVENTS = {"Activity Buffer Request", "Command Buffer Full", "Lazy Function Loading"}


def launched(function: Callable[[], Tensor]) -> list[str]:
    function()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        function()
        torch.cuda.synchronize()
    on_device = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return [event.name for event in on_device if event.name not in PROFILER_EVENTS]


@pytest.mark.parametrize("mode", MODES)
def test_each_call_is_one_launch_and_nothing_else(mode: str) -> None:
    for name, call in calls(CodecConfig(element="e4m3", **MODES[mode])).items():
        assert launched(call) == [name.split()[0]], name


@pytest.mark.parametrize("element", ["e4m3", "int8"])
def test_no_call_waits_for_the_device(element: str) -> None:
    prepared = calls(CodecConfig(element=element))
    for call in prepared.values():
        call()  # compiled before the check
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for call in prepared.values():
            call()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("codec", codecs((128,)))
def test_runs_repeat_bit_for_bit(codec: CodecConfig) -> None:
    num_values = 2**16 + 5
    for name, call in calls(codec).items():
        first = call()
        for _ in range(5):
            again = call()
            if first.dtype == torch.uint8:
                assert_same_message(again, first, codec, num_values)
            else:
                assert torch.equal(again, first), name


def test_kernels_run_on_the_current_stream() -> None:
    codec = CodecConfig(element="int8")
    values = sample("gauss", 1, 2**20)
    stream = torch.cuda.Stream()
    target = torch.zeros(1, 2**20, device="cuda")
    source = values.cuda()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # some 30 ms, in which a kernel on another stream would read zeros
        target.copy_(source)
        messages = encode(target, codec)
        decoded = decode(messages, codec, 2**20, torch.float32)
    stream.synchronize()
    expected = encode_reference(values, codec)
    assert_same_message(messages, expected, codec, 2**20)
    assert_same_bits(decoded, decode_reference(expected, codec, 2**20, torch.float32))


# Offsets that do not fit in 31 bits.


@pytest.fixture
def much_memory() -> Iterator[None]:
    torch.cuda.empty_cache()
    free_bytes, _ = torch.cuda.mem_get_info()
    if free_bytes < 32 * 2**30:
        pytest.skip(f"needs 32 GiB of device memory, {free_bytes / 2**30:.0f} GiB are free")
    yield
    torch.cuda.empty_cache()


NUM_BLOCKS_COMPARED = 40  # more than one program's share, the short last block included


def last_blocks(messages: Tensor, num_values: int, codec: CodecConfig) -> Tensor:
    """The messages that the last blocks would make alone, cut out of `messages` by their byte offsets."""
    layout = MessageLayout.of(num_values, codec)
    first = layout.num_blocks - NUM_BLOCKS_COMPARED
    size = 4 * NUM_BLOCKS_COMPARED
    parts = [messages[:, first * codec.block_size : layout.num_blocks * codec.block_size]]
    for offset_bytes in (layout.scale_offset_bytes, layout.alpha_offset_bytes):
        parts.append(messages[:, offset_bytes + 4 * first : offset_bytes + 4 * first + size])
    return torch.cat(parts if codec.scale_mode == "dual" else parts[:2], 1).cpu()


@pytest.mark.usefixtures("much_memory")
@pytest.mark.parametrize(
    "codec", [CodecConfig(element="e4m3"), CodecConfig(element="int8", scale_mode="dual")], ids=str
)
def test_one_row_of_more_than_2_31_values(codec: CodecConfig) -> None:
    num_values = 2**31 + 128 + 5
    values = torch.empty(1, num_values, dtype=torch.bfloat16, device="cuda").normal_()
    messages = encode(values, codec)
    start = (MessageLayout.of(num_values, codec).num_blocks - NUM_BLOCKS_COMPARED) * codec.block_size
    tail = values[:, start:].cpu()
    expected = encode_reference(tail, codec)
    num_tail = tail.shape[1]
    assert_same_bits(last_blocks(messages, num_values, codec), content(expected, codec, num_tail))
    decoded = decode(messages, codec, num_values, torch.bfloat16)
    del messages
    assert_same_bits(decoded[:, start:], decode_reference(expected, codec, num_tail, torch.bfloat16))
    for part, original in zip(decoded.split(2**27, dim=1), values.split(2**27, dim=1), strict=True):
        error = (part.float() - original.float()).norm() / original.float().norm()
        assert error < (0.03 if codec.element == "e4m3" else 0.008)


@pytest.mark.usefixtures("much_memory")
def test_rows_that_start_past_2_31_values() -> None:
    codec = CodecConfig(element="e4m3")
    num_values = 2**30 + 1
    values = torch.empty(NUM_SOURCES, num_values, dtype=torch.bfloat16, device="cuda").normal_()
    start = (MessageLayout.of(num_values, codec).num_blocks - NUM_BLOCKS_COMPARED) * codec.block_size
    tail = values[:, start:].cpu()
    num_tail = tail.shape[1]
    messages = encode(values, codec)
    del values
    expected = encode_reference(tail, codec)
    assert_same_bits(last_blocks(messages, num_values, codec), content(expected, codec, num_tail))
    decoded = decode(messages, codec, num_values, torch.bfloat16)
    assert_same_bits(decoded[:, start:], decode_reference(expected, codec, num_tail, torch.bfloat16))
    del decoded
    total = decode_sum(messages, codec, num_values, torch.bfloat16)
    expected_total = decode_sum_reference(expected, codec, num_tail, torch.bfloat16)
    assert_same_bits(total[start:], expected_total)
    again = requantize(messages, codec, num_values)
    expected_again = requantize_reference(expected, codec, num_tail)
    assert_same_bits(last_blocks(again, num_values, codec), content(expected_again, codec, num_tail))


OTHER_DEVICE = """
import torch
from lightning_taco.codec import decode, encode
from lightning_taco.codec.reference import decode_reference, encode_reference
from lightning_taco.config import CodecConfig

codec = CodecConfig(element="e4m3")
values = torch.randn(2, 1000)
assert torch.cuda.current_device() == 0
message = encode(values.to("cuda:1"), codec)
decoded = decode(message, codec, 1000, torch.float32)
expected = decode_reference(encode_reference(values, codec), codec, 1000, torch.float32)
assert decoded.device == torch.device("cuda:1")
assert torch.equal(decoded.cpu(), expected)
"""


@pytest.mark.multigpu
def test_tensors_of_another_than_the_current_device() -> None:
    # In a process of its own: a kernel that ran on the wrong device would leave this one's CUDA unusable.
    done = subprocess.run([sys.executable, "-c", OTHER_DEVICE], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
