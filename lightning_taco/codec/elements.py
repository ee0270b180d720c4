"""The numeric formats of a code, shared by the reference and the kernels."""

from __future__ import annotations

from dataclasses import dataclass

CODE_MAX = {"e4m3": 448.0, "e5m2": 57344.0, "int8": 127.0, "int6": 31.0, "int5": 15.0, "int4": 7.0}


@dataclass(frozen=True)
class FloatFormat:
    """An 8-bit float: sign, exponent, mantissa."""

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
}

# A 32-bit mixing function of good avalanche ("lowbias32"): shift, multiply, shift, multiply, shift.
MIX_SHIFTS = (16, 15, 16)
MIX_FACTORS = (0x7FEB352D, 0x846CA68B)
