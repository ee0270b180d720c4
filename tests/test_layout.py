"""The byte layout of a message: sizes by formula, alignment, no overlap."""

import doctest

import pytest

from lightning_taco.codec import layout as layout_module
from lightning_taco.codec.layout import MessageLayout
from lightning_taco.config import BLOCK_SIZES, CodecConfig


@pytest.mark.parametrize("scale_mode", ["merged", "dual", "fine"])
@pytest.mark.parametrize("element", ["e4m3", "int8"])
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_sizes_follow_the_formula(block_size: int, element: str, scale_mode: str) -> None:
    if scale_mode == "fine" and block_size == 32:
        return  # refused by CodecConfig: one sub-block
    codec = CodecConfig(element=element, block_size=block_size, scale_mode=scale_mode)
    large = [2**31 - 1, 2**31, 2**31 + 128, 2**40 + 1]
    for num_values in [*range(301), block_size * 7, block_size * 7 + 1, *large]:
        layout = MessageLayout.of(num_values, codec)
        num_blocks = (num_values + block_size - 1) // block_size
        num_scale_bytes = 4 * num_blocks
        end_bytes = num_blocks * block_size + num_scale_bytes
        end_bytes += {"merged": 0, "dual": num_scale_bytes, "fine": num_blocks * block_size // 32}[scale_mode]
        assert layout.num_values == num_values
        assert layout.num_blocks == num_blocks
        # One byte a code, and every block size is a multiple of 16: the scales follow the codes at once.
        assert layout.scale_offset_bytes == num_blocks * block_size
        assert layout.alpha_offset_bytes == layout.scale_offset_bytes + num_scale_bytes
        assert end_bytes <= layout.message_bytes < end_bytes + 16
        assert layout.message_bytes % 16 == 0
        assert layout.scale_offset_bytes % 16 == 0
        assert layout.alpha_offset_bytes % 4 == 0


def test_worked_example() -> None:
    merged = MessageLayout.of(300, CodecConfig(element="e4m3", block_size=128))
    dual = MessageLayout.of(300, CodecConfig(element="e4m3", block_size=128, scale_mode="dual"))
    assert merged == MessageLayout(300, 3, 384, 396, 400)
    assert dual == MessageLayout(300, 3, 384, 396, 416)


def test_no_values_take_no_bytes() -> None:
    assert MessageLayout.of(0, CodecConfig(element="int8")) == MessageLayout(0, 0, 0, 0, 0)


def test_bytes_per_value_approach_the_bits_that_the_settings_state() -> None:
    for block_size in BLOCK_SIZES:
        for scale_mode in ("merged", "dual"):
            codec = CodecConfig(element="int8", block_size=block_size, scale_mode=scale_mode)
            num_values = 512 * 1000
            assert 8 * MessageLayout.of(num_values, codec).message_bytes / num_values == codec.bits_per_value


def test_docstring_examples_run() -> None:
    results = doctest.testmod(layout_module)
    assert results.failed == 0
    assert results.attempted == 3
