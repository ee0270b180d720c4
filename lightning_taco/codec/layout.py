"""Byte layout of a message: ``[codes, padded to 16 bytes][scale_inv][alpha]``, padded to 16 bytes.

`alpha` is one fp32 a block in dual mode, one byte for each 32 values in fine mode, and missing in merged mode.

Codes of fewer than 8 bits are packed in planes of 4, 2 and 1 bits, the lowest bits first: 4 + 2 + 1 for int7, 4 + 2 for
int6, 4 + 1 for int5, 2 + 1 for int3. A plane holds these bits of all blocks, as many values a byte as fit. A byte holds
values that lie half a block, a quarter, an eighth apart (value i with value i + block/2), so that packing folds halves
and nothing crosses neighbours.

Codes and scales share one buffer, so that one exchange carries both; every row of a batch of messages starts at a
multiple of 16 bytes, so that 16-byte vector access holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from lightning_taco.config import BITS_PER_CODE, SUB_BLOCK_SIZE, CodecConfig

ALIGNMENT_BYTES = 16
SCALE_BYTES = 4


@dataclass(frozen=True)
class MessageLayout:
    """Where things lie in the message of `num_values` values.

    Example:
        >>> layout = MessageLayout.of(300, CodecConfig(element="e4m3", block_size=128))
        >>> layout.num_blocks, layout.scale_offset_bytes, layout.message_bytes
        (3, 384, 400)
    """

    num_values: int
    num_blocks: int
    scale_offset_bytes: int
    alpha_offset_bytes: int
    message_bytes: int

    @staticmethod
    @lru_cache(maxsize=1024)
    def of(num_values: int, codec: CodecConfig) -> MessageLayout:
        """The layout of `num_values` values, the last block filled up with zeros."""
        num_blocks = -(-num_values // codec.block_size)
        codes_bytes = _aligned(num_blocks * codec.block_size * BITS_PER_CODE[codec.element] // 8)
        alpha_offset_bytes = codes_bytes + num_blocks * SCALE_BYTES
        return MessageLayout(
            num_values=num_values,
            num_blocks=num_blocks,
            scale_offset_bytes=codes_bytes,
            alpha_offset_bytes=alpha_offset_bytes,
            message_bytes=_aligned(alpha_offset_bytes + num_blocks * alpha_bytes(codec)),
        )


def plane_bits(bits: int) -> tuple[tuple[int, int], ...]:
    """First bit and number of bits of each plane of codes of so many bits.

    >>> plane_bits(8), plane_bits(7), plane_bits(5)
    (((0, 8),), ((0, 4), (4, 2), (6, 1)), ((0, 4), (4, 1)))
    """
    return tuple((bits & ~(2 * width - 1), width) for width in (8, 4, 2, 1) if bits & width)


def alpha_bytes(codec: CodecConfig) -> int:
    """Bytes that one block has behind its scale."""
    return {"merged": 0, "dual": SCALE_BYTES, "fine": codec.block_size // SUB_BLOCK_SIZE}[codec.scale_mode]


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
