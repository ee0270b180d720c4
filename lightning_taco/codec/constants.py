"""What a codec's kernels are compiled for, as one hashable value: a kernel takes it as its only codec argument."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from lightning_taco.codec.elements import CODE_MAX, FLOAT_FORMATS, FP8_ELEMENTS, NF4_LEVELS, gaussian_half, gaussian_top
from lightning_taco.codec.layout import alpha_bytes, plane_bits
from lightning_taco.config import BITS_PER_CODE, SUB_BLOCK_SIZE, CodecConfig

THREADS_PER_PROGRAM = 128
LANE_VALUES = 8
"""Neighbouring values that one thread reads at once: 16 bytes of bf16."""
LANES = 4
"""Threads that share a block, where its codes let them: so a warp reads and writes whole sectors of memory."""
MAX_VALUES_PER_THREAD = 64
MAX_WIDTH = 256
"""Of a part: what one warp reads at once."""


@dataclass(frozen=True, repr=False, eq=False)
class KernelConstants:
    """Constants of one codec on one kind of device; `of` gives one object for each, so comparing them costs nothing."""

    element: str
    bits: int
    mantissa: int
    """Bits of a float's mantissa; 0 for an integer, and for a table."""
    bias: int
    largest: int
    """The largest integer, or the bits of the largest float."""
    code_max: float
    is_gaussian: bool
    gaussian_half: float
    gaussian_top: float
    is_nvidia: bool
    """Whether instructions of NVIDIA's are used."""
    is_native_fp8: bool
    """Whether the device's own conversions to and from FP8 are used; NVIDIA's only."""
    is_stochastic: bool
    is_rotated: bool
    is_dual: bool
    is_fine: bool
    code_bytes: int
    """Bytes of a block's codes, in all planes."""
    alpha_bytes: int
    """Bytes that a block has behind its scale."""
    block_size: int
    log2_block_size: int
    parts: int
    """Tensors that a tile is held in: tensor j has values j * width to (j + 1) * width of each block."""
    log2_parts: int
    width: int
    log2_width: int
    lane_values: int
    """Neighbouring values of a part that one thread has."""
    tile: int
    """Blocks of one program."""
    is_whole: bool = False
    """Whether every program has as many blocks, all of them whole."""

    @staticmethod
    @cache
    def of(codec: CodecConfig, is_nvidia: bool, is_native_fp8: bool, max_width: int = MAX_WIDTH) -> KernelConstants:
        """The constants of `codec`, whose element is resolved."""
        width = min(_width(codec), max_width)
        lanes, parts = max(1, width // LANE_VALUES), codec.block_size // width
        bits, form = BITS_PER_CODE[codec.element], FLOAT_FORMATS.get(codec.element)
        return KernelConstants(
            element=codec.element,
            bits=bits,
            mantissa=form.mantissa_bits if form else 0,
            bias=form.exponent_bias if form else 0,
            largest=form.largest_code if form else int(CODE_MAX[codec.element]),
            code_max=CODE_MAX[codec.element],
            is_gaussian=codec.levels == "gaussian",
            gaussian_half=float(gaussian_half(bits)),
            gaussian_top=gaussian_top(bits),
            is_nvidia=is_nvidia,
            is_native_fp8=is_native_fp8 and codec.element in FP8_ELEMENTS,
            is_stochastic=codec.rounding == "stochastic",
            is_rotated=codec.rotation,
            is_dual=codec.scale_mode == "dual",
            is_fine=codec.scale_mode == "fine",
            code_bytes=codec.block_size * bits // 8,
            alpha_bytes=alpha_bytes(codec),
            block_size=codec.block_size,
            log2_block_size=codec.block_size.bit_length() - 1,
            parts=parts,
            log2_parts=parts.bit_length() - 1,
            width=width,
            log2_width=width.bit_length() - 1,
            lane_values=min(width, LANE_VALUES),
            tile=THREADS_PER_PROGRAM // lanes,
        )

    def for_values(self, num_values: int) -> KernelConstants:
        """The same for rows of `num_values`, which need no masks if tiles divide them."""
        return self._whole() if num_values % (self.tile * self.block_size) == 0 else self

    @cache  # noqa: B019  one object for each, as for `of`
    def _whole(self) -> KernelConstants:
        return replace(self, is_whole=True)

    @property
    def zero_word(self) -> int:
        """Four codes of zero."""
        return 0x01010101 * NF4_LEVELS.index(0.0) if self.element == "nf4" else 0

    @property
    def halvings(self) -> tuple[int, ...]:
        """The shape of a part with an axis for each bit of a value's place in it."""
        return self.tile, *(2,) * self.log2_width

    def __repr__(self) -> str:
        """All fields, in letters that a symbol of a compiled kernel may have."""
        return "_".join(str(value).replace(".", "p") for value in vars(self).values())


def _width(codec: CodecConfig) -> int:
    """Of a part: as many threads share a block as `LANES` or the registers ask for, and the codes and scales allow."""
    lanes = max(LANES, codec.block_size // MAX_VALUES_PER_THREAD)
    width = min(lanes * LANE_VALUES, codec.block_size // _min_parts(codec))
    return min(width, SUB_BLOCK_SIZE) if codec.scale_mode == "fine" else width


def _min_parts(codec: CodecConfig) -> int:
    """Values that share a byte of a plane, or the bits of a random number, are the same place of different parts."""
    narrowest = min(width for _, width in plane_bits(BITS_PER_CODE[codec.element]))
    return max(8 // narrowest, 2 if codec.rounding == "stochastic" else 1)
