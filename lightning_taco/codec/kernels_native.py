"""What NVIDIA's processors do to bytes in one instruction each, where Triton would take several.

Functions of Triton only; `KernelConstants.is_nvidia` says whether they can be called. What they replace stands beside
each of their calls, runs on other devices and in the interpreter, and has the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def bytes_to_word(first, second, third, fourth):
    """The low bytes of four int32 of one shape, the first of them lowest."""
    return tl.inline_asm_elementwise(
        "{.reg .b32 low, high; prmt.b32 low, $1, $2, 0x0040; prmt.b32 high, $3, $4, 0x0040;"
        " prmt.b32 $0, low, high, 0x5410;}",
        "=r,r,r,r,r",
        [first, second, third, fourth],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def word_to_bytes(words, ABOVE: tl.constexpr):
    """The bytes of int32, lowest first, each with the three higher bytes of ABOVE: four int32 of its shape."""
    return tl.inline_asm_elementwise(
        "prmt.b32 $0, $4, $5, 0x7650; prmt.b32 $1, $4, $5, 0x7651; prmt.b32 $2, $4, $5, 0x7652;"
        " prmt.b32 $3, $4, $5, 0x7653;",
        "=&r,=&r,=&r,=r,r,r",
        [words, tl.full(words.shape, ABOVE, tl.int32)],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )


@triton.constexpr_function
def _to_fp8_pairs(element):
    convert = f"cvt.rn.satfinite.{element}x2.f32"
    return f"{{.reg .b16 low, high; {convert} low, $2, $1; {convert} high, $4, $3; mov.b32 $0, {{low, high}};}}"


@triton.jit
def floats_to_fp8_word(first, second, third, fourth, C: tl.constexpr):
    """Four fp32 of one shape, rounded to the nearest of an FP8 element, in int32, the first of them lowest."""
    return tl.inline_asm_elementwise(
        _to_fp8_pairs(C.element),
        "=r,f,f,f,f",
        [first, second, third, fourth],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def e4m3_word_to_floats(words):
    """Four E4M3 in each int32 -> four fp32 of its shape, the lowest first."""
    return tl.inline_asm_elementwise(
        "{.reg .b16 low, high, first, second, third, fourth; .reg .b32 both; mov.b32 {low, high}, $4;"
        " cvt.rn.f16x2.e4m3x2 both, low; mov.b32 {first, second}, both;"
        " cvt.f32.f16 $0, first; cvt.f32.f16 $1, second;"
        " cvt.rn.f16x2.e4m3x2 both, high; mov.b32 {third, fourth}, both;"
        " cvt.f32.f16 $2, third; cvt.f32.f16 $3, fourth;}",
        "=&f,=&f,=&f,=f,r",
        [words],
        dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
        is_pure=True,
        pack=1,
    )


@triton.jit
def bf16_to_floats(values):
    """bf16 -> fp32, two at a time."""
    return tl.inline_asm_elementwise(
        "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;",
        "=&f,=f,r",
        [values],
        dtype=tl.float32,
        is_pure=True,
        pack=2,
    )
