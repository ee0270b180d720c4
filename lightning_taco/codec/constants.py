"""What a codec's kernels are compiled for, as one hashable value: a kernel takes it as its only codec argument."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from lightning_taco.codec.elements import CODE_MAX, FLOAT_FORMATS, FP8_ELEMENTS, gaussian_half, gaussian_top
from lightning_taco.codec.layout import alpha_bytes
from lightning_taco.config import BITS_PER_CODE, CodecConfig

THREADS_PER_PROGRAM = 64
MAX_PARTS = 16
MIN_PARTS = 8
"""An eighth of a block is the smallest part that a byte of a plane can hold a bit of."""


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
    is_native_fp8: bool
    """Whether the device's own conversions to and from FP8 are used."""
    is_stochastic: bool
    is_rotated: bool
    is_dual: bool
    is_fine: bool
    code_bytes: int
    """Bytes of a block's codes, in all planes."""
    alpha_bytes: int
    """Bytes that a block has behind its scale."""
    block_size: int
    parts: int
    """Tensors that a tile is held in: tensor j has values j * width to (j + 1) * width of each block."""
    log2_parts: int
    width: int
    log2_width: int
    tile: int
    """Blocks of one program."""

    @staticmethod
    @cache
    def of(codec: CodecConfig, is_native_fp8: bool) -> KernelConstants:
        """The constants of `codec`, whose element is resolved."""
        parts = max(MIN_PARTS, min(MAX_PARTS, codec.block_size // MIN_PARTS))
        width = codec.block_size // parts
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
            is_native_fp8=is_native_fp8 and codec.element in FP8_ELEMENTS,
            is_stochastic=codec.rounding == "stochastic",
            is_rotated=codec.rotation,
            is_dual=codec.scale_mode == "dual",
            is_fine=codec.scale_mode == "fine",
            code_bytes=codec.block_size * bits // 8,
            alpha_bytes=alpha_bytes(codec),
            block_size=codec.block_size,
            parts=parts,
            log2_parts=parts.bit_length() - 1,
            width=width,
            log2_width=width.bit_length() - 1,
            tile=min(THREADS_PER_PROGRAM, THREADS_PER_PROGRAM * _max_values_per_thread(codec) // codec.block_size),
        )

    def __repr__(self) -> str:
        """All fields, in letters that a symbol of a compiled kernel may have."""
        return "_".join(str(value).replace(".", "p") for value in vars(self).values())


def _max_values_per_thread(codec: CodecConfig) -> int:
    """What fits into the registers of one thread, beside what the mode works with."""
    return 64 if codec.scale_mode == "fine" else 128
