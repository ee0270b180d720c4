"""The numeric formats of a code, shared by the reference and the kernels."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from itertools import pairwise

CODE_MAX = {
    "e4m3": 448.0,
    "e5m2": 57344.0,
    "int8": 127.0,
    "int7": 63.0,
    "int6": 31.0,
    "int5": 15.0,
    "int4": 7.0,
    "int3": 3.0,
    "fp4": 6.0,
    "nf4": 1.0,
}
FP8_ELEMENTS = ("e4m3", "e5m2")


@dataclass(frozen=True)
class FloatFormat:
    """A float of 8 or 4 bits: sign, exponent, mantissa."""

    mantissa_bits: int
    exponent_bias: int
    largest_code: int
    """Bits of the largest finite value."""

    @property
    def smallest_step(self) -> float:
        """Spacing of the subnormals."""
        return 2.0 ** (1 - self.exponent_bias - self.mantissa_bits)


FLOAT_FORMATS = {
    "e4m3": FloatFormat(mantissa_bits=3, exponent_bias=7, largest_code=0x7E),
    "e5m2": FloatFormat(mantissa_bits=2, exponent_bias=15, largest_code=0x7B),
    "fp4": FloatFormat(mantissa_bits=1, exponent_bias=1, largest_code=0x7),  # E2M1: 0, 0.5, 1, 1.5, 2, 3, 4, 6
}


def _as_fp32(value: float) -> float:
    return struct.unpack("f", struct.pack("f", value))[0]


# The 4-bit NormalFloat of QLoRA (arXiv 2305.14314, appendix E): quantiles of a Gaussian, scaled to reach 1; fp32.
NF4_LEVELS = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
NF4_MIDPOINTS = tuple(_as_fp32((low + high) / 2) for low, high in pairwise(NF4_LEVELS))
"""Between code i and code i + 1; what lies on one goes to the lower code."""

# ``levels="gaussian"``: with h = 2^(bits-1), code c from -h to h - 1 stands for c (CENTRE + EDGE (c / h)^2), and codes
# lie CENTRE apart at zero and nearly CENTRE + 3 EDGE at the ends. Close to the best places for Gaussian values over the
# largest of 32 to 512 of them; every level is exact in fp32.
GAUSSIAN_CENTRE, GAUSSIAN_EDGE = 11 / 16, 5 / 16
# Its inverse, within 0.0015 of it: x (I0 + |x| (I1 + |x| (I2 + |x| I3))) for x from -1 to 1.
GAUSSIAN_INVERSE = (1.499746, -0.437543, -0.269517, 0.207314)


def gaussian_half(bits: int) -> int:
    """Codes on either side of zero, the outermost of them on the negative side only."""
    return 1 << (bits - 1)


def gaussian_top(bits: int) -> float:
    """The level of the largest positive code."""
    half = gaussian_half(bits)
    return (half - 1) * (GAUSSIAN_CENTRE + GAUSSIAN_EDGE * ((half - 1) / half) ** 2)


# A 32-bit mixing function of good avalanche ("lowbias32"): shift, multiply, shift, multiply, shift.
MIX_SHIFTS = (16, 15, 16)
MIX_FACTORS = (0x7FEB352D, 0x846CA68B)
PLACE_FACTOR = 0x9E3779B9  # 2^32 over the golden ratio: neighbouring places get keys far apart
