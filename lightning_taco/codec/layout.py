"""Byte layout of a message: ``[codes, padded to 16 bytes][scale_inv][alpha, dual mode only]``, padded to 16 bytes.

Codes of fewer than 8 bits are packed in two planes: the low 4 bits of all blocks, two values a byte, then the high bits
(2 for int6, 1 for int5), four or eight values a byte. A byte holds values that lie half a block, a quarter, an eighth
apart (value i with value i + block/2), so that packing folds halves and nothing crosses neighbours.

Codes and scales share one buffer, so that one exchange carries both; every row of a batch of messages starts at a
multiple of 16 bytes, so that 16-byte vector access holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from lightning_taco.config import BITS_PER_CODE, CodecConfig

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
    high_plane_offset_bytes: int
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
        num_scales = 2 if codec.scale_mode == "dual" else 1
        return MessageLayout(
            num_values=num_values,
            num_blocks=num_blocks,
            high_plane_offset_bytes=num_blocks * codec.block_size // 2,
            scale_offset_bytes=codes_bytes,
            alpha_offset_bytes=alpha_offset_bytes,
            message_bytes=_aligned(codes_bytes + num_scales * num_blocks * SCALE_BYTES),
        )


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
