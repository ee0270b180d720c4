"""Where values and messages may lie: rows in segments, parts of rows, messages in buffers known by their address.

Each gives the bits that the plain call gives on a copy. Kernels run in Triton's interpreter.
"""

import math

import pytest
import torch
from torch import Tensor

from lightning_taco.codec import addressed, decode, encode, requantize
from lightning_taco.codec.addressed import AddressedMessages
from lightning_taco.codec.layout import MessageLayout, alpha_bytes
from lightning_taco.codec.reference import (
    decode_reference,
    encode_reference,
    requantize_reference,
)
from lightning_taco.config import CodecConfig
from tests.test_codec_reference import assert_same_bits, sample

ROWS, SEGMENTS, LENGTH = 2, 3, 128
NUM_VALUES = SEGMENTS * LENGTH
STOCHASTIC = CodecConfig(element="int4", block_size=64, rounding="stochastic")
CODECS = [CodecConfig(element="int8", block_size=64), STOCHASTIC]
FINE = CodecConfig(element="int6", block_size=64, scale_mode="fine")
DUAL = CodecConfig(element="e4m3", block_size=64, scale_mode="dual")

interpreter = pytest.mark.interpreter


def segmented(rows: int = ROWS) -> Tensor:
    """``[R, S, L]``, whose segments lie R segments apart and whose rows lie one: a tensor cut along a middle dim."""
    values = sample("student_t3", 1, rows * NUM_VALUES).view(SEGMENTS, rows, LENGTH)
    return values.transpose(0, 1)


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_segments_are_read_and_written_where_they_are(codec: CodecConfig) -> None:
    values = segmented()
    messages = encode(values, codec, seed=5)
    assert torch.equal(messages, encode(values.flatten(1), codec, seed=5))
    out = torch.full((SEGMENTS, ROWS, LENGTH), math.nan)
    decode(messages, codec, NUM_VALUES, torch.float32, out=out.transpose(0, 1))
    assert_same_bits(out.transpose(0, 1).flatten(1), decode(messages, codec, NUM_VALUES, torch.float32))


def test_parts_of_rows_have_the_bits_of_the_whole() -> None:
    """Otherwise a slice that is sent by itself would be rounded by other random numbers."""
    values = sample("student_t3", ROWS, NUM_VALUES)
    whole = encode(values, STOCHASTIC, seed=5)
    layout = MessageLayout.of(NUM_VALUES, STOCHASTIC)
    blocks, code_bytes = NUM_VALUES // 64, 32
    for first, last in ((0, 2), (2, blocks)):
        part = encode(
            values[:, first * 64 : last * 64], STOCHASTIC, seed=5, first_block=first, row_blocks=layout.num_blocks
        )
        num_code_bytes = (last - first) * code_bytes
        assert torch.equal(part[:, :num_code_bytes], whole[:, first * code_bytes : last * code_bytes])
    plain = encode(values[:, 128:], STOCHASTIC, seed=5)
    assert not torch.equal(plain[:, : 4 * code_bytes], whole[:, 2 * code_bytes : 6 * code_bytes])
    again = requantize(whole, STOCHASTIC, NUM_VALUES, seed=9)
    last_part = requantize(
        encode(values[:, 128:], STOCHASTIC, seed=5, first_block=2, row_blocks=blocks),
        STOCHASTIC,
        NUM_VALUES - 128,
        seed=9,
        first_block=2,
    )
    assert torch.equal(last_part[0, : 4 * code_bytes], again[0, 2 * code_bytes : blocks * code_bytes])


@interpreter
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_kernels_read_and_write_segments(codec: CodecConfig) -> None:
    kernels = pytest.importorskip("lightning_taco.codec.kernels")
    values = segmented()
    expected = encode_reference(values.flatten(1), codec, seed=5, first_block=3, row_blocks=40)
    messages = torch.zeros_like(expected)
    kernels.encode_triton(values, codec, messages, seed=5, first_block=3, row_blocks=40)
    used = MessageLayout.of(NUM_VALUES, codec).alpha_offset_bytes
    assert torch.equal(messages[:, :used], expected[:, :used])
    out = torch.full((SEGMENTS, ROWS + 1, LENGTH), math.nan)
    kernels.decode_triton(messages, codec, out[:, :ROWS].transpose(0, 1))
    assert out[:, ROWS].isnan().all(), "written outside of the segments"
    decoded = decode_reference(messages, codec, NUM_VALUES, torch.float32)
    assert_same_bits(out[:, :ROWS].transpose(0, 1).flatten(1), decoded)


@interpreter
@pytest.mark.parametrize("codec", [*CODECS, FINE, DUAL], ids=str)
@pytest.mark.parametrize(("num_rows", "num_buffers", "offset_bytes"), [(1, 3, 48), (2, 2, 0)])
def test_kernels_write_messages_to_addresses(
    codec: CodecConfig, num_rows: int, num_buffers: int, offset_bytes: int
) -> None:
    """One message to all buffers, or one to each; nothing before and behind it is touched."""
    pytest.importorskip("lightning_taco.codec.kernels")
    num_values = 300
    values = sample("gauss", num_rows, num_values)
    expected = encode_reference(values, codec, seed=2, first_block=4, row_blocks=9)
    used = used_bytes(codec, num_values)
    buffers = [torch.full((offset_bytes + expected.shape[1] + 32,), 255, dtype=torch.uint8) for _ in range(num_buffers)]
    assert all(buffer.data_ptr() % 16 == 0 for buffer in buffers)
    to = AddressedMessages(torch.tensor([buffer.data_ptr() for buffer in buffers]), offset_bytes)
    addressed.encode_to(to, values, codec, seed=2, first_block=4, row_blocks=9)
    for place, buffer in enumerate(buffers):
        row = expected[place * num_rows // num_buffers]
        assert torch.equal(buffer[offset_bytes : offset_bytes + used], row[:used])
        assert (buffer[:offset_bytes] == 255).all()
        assert (buffer[offset_bytes + expected.shape[1] :] == 255).all()
    if num_rows == 2:
        addressed.requantize_to(to, expected, codec, num_values, average=True, seed=8, first_block=3)
        row = requantize_reference(expected, codec, num_values, average=True, seed=8, first_block=3)[0]
        assert all(torch.equal(buffer[:used], row[:used]) for buffer in buffers)


def used_bytes(codec: CodecConfig, num_values: int) -> int:
    """Of a message, without the padding at its end."""
    layout = MessageLayout.of(num_values, codec)
    return layout.alpha_offset_bytes + layout.num_blocks * alpha_bytes(codec)


def test_addressed_messages_refuse_what_does_not_fit() -> None:
    addresses = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="offset_bytes=8 is not a multiple of 16: align it"):
        AddressedMessages(addresses, 8)
    to = AddressedMessages(addresses)
    with pytest.raises(ValueError, match="2 buffers were given for 3 messages; give as many for each of them"):
        addressed.encode_to(to, torch.zeros(3, 64), CODECS[0])
    with pytest.raises(
        ValueError, match=r"shape \(1, 8\) and dtype torch.uint8; 100 values in .* need uint8 \[rows, 144\]"
    ):
        addressed.requantize_to(to, torch.zeros(1, 8, dtype=torch.uint8), CODECS[0], 100)
    with pytest.raises(TypeError, match="float64"):
        addressed.encode_to(to, torch.zeros(2, 100, dtype=torch.float64), CODECS[0])


def test_messages_that_begin_within_a_word_are_refused() -> None:
    """Kernels read four codes at once: a GPU would stop with a misaligned address, and its context would be lost."""
    message = encode(torch.ones(1, 100), CODECS[0])
    shifted = torch.zeros(message.numel() + 1, dtype=torch.uint8)[1:].view(1, -1)
    shifted.copy_(message)
    for call in (
        lambda: decode(shifted, CODECS[0], 100, torch.float32),
        lambda: requantize(shifted, CODECS[0], 100),
        lambda: encode(torch.ones(1, 100), CODECS[0], out=shifted),
    ):
        with pytest.raises(ValueError, match=r"begins 1 bytes after a multiple of 4 .* pass a clone\(\)"):
            call()
    assert (
        decode(shifted.clone(), CODECS[0], 100, torch.float32).eq(decode(message, CODECS[0], 100, torch.float32)).all()
    )


def test_out_in_segments_refuses_what_does_not_fit() -> None:
    messages = encode(torch.ones(1, 256), CODECS[0])
    with pytest.raises(ValueError, match="out have segments of 32 values, which cut blocks of 64"):
        decode(messages, CODECS[0], 256, torch.float32, out=torch.zeros(1, 8, 32))
    with pytest.raises(ValueError, match=r"out is torch.float32 \(1, 3, 64\).*\(1, 3, 85\)"):
        decode(messages, CODECS[0], 256, torch.float32, out=torch.zeros(1, 3, 64))
