"""Quantisers that the codecs are measured against: what others send, written in plain torch, for error only.

Each is a function of a tensor that returns what a receiver would hold and the bits that were sent for it. But for
TAH-Quant they have no wire format and no kernel; none can be chosen for tensor parallelism.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_taco.codec import TahQuant
from lightning_taco.codec.reference import hadamard_transform_reference

E4M3_MAX = 448.0
INT8_MAX = 127.0
FP32_BITS = 32
ROTATED_VALUES = 128
TAH_QUANT = TahQuant(scale_format="float16")


class Reconstruction(NamedTuple):
    """What arrives: fp32 values in the shape of what was sent, and the bits on the wire, a number or a 0-dim tensor."""

    values: Tensor
    num_bits: Tensor | float


Baseline = Callable[[Tensor], Reconstruction]


def int8_per_tensor(values: Tensor) -> Reconstruction:
    """INT8 to nearest, one fp32 scale for all of `values`, fp32 of any shape."""
    scale = _scale(values.abs().amax(), INT8_MAX)
    return Reconstruction((values / scale).round() * scale, 8 * values.numel() + FP32_BITS)


def fp8_per_tensor(values: Tensor) -> Reconstruction:
    """E4M3 with one fp32 scale for all of `values`, fp32 of any shape."""
    return Reconstruction(_e4m3_scaled(values, values.abs().amax()), 8 * values.numel() + FP32_BITS)


def fp8_per_row(values: Tensor) -> Reconstruction:
    """E4M3 with one fp32 scale for each row, the last dim of `values`, fp32 ``[..., C]``."""
    num_rows = values.numel() // values.shape[-1]
    amax = values.abs().amax(dim=-1, keepdim=True)
    return Reconstruction(_e4m3_scaled(values, amax), 8 * values.numel() + FP32_BITS * num_rows)


def fp8_unscaled(values: Tensor) -> Reconstruction:
    """E4M3 as it is, with no scale: what lies beyond 448 becomes 448, as in the conversion of the hardware."""
    return Reconstruction(_e4m3(values), 8 * values.numel())


def rotation_fp8_per_tensor(values: Tensor) -> Reconstruction:
    """Blocks of 128 rotated by the orthonormal Hadamard matrix, then E4M3 with one fp32 scale for all.

    The rotation alone: no scale fits what a block looks like after it.
    """
    flat = values.reshape(-1)
    blocks = F.pad(flat, (0, -flat.numel() % ROTATED_VALUES)).view(-1, ROTATED_VALUES)
    rotated = _rotate(blocks)
    decoded = _rotate(_e4m3_scaled(rotated, rotated.abs().amax()))
    return Reconstruction(decoded.reshape(-1)[: flat.numel()].view(values.shape), 8 * rotated.numel() + FP32_BITS)


def tah_quant(values: Tensor) -> Reconstruction:
    """TAH-Quant, made for activations between pipeline stages, used for tensor-parallel messages; scales in fp16.

    Args:
        values: fp32 ``[samples, ..., channels]``, tokens between; ``[tokens, channels]`` counts as one sample.

    Source: TAH-Quant, arXiv 2506.01352, as `TahQuant` has it. What fp16 cannot hold is lost here as it is there: steps
    below 6e-8 become zero, so that a tile of small gradients arrives as one value, and beyond 65504 it is NaN.
    """
    message = TAH_QUANT.encode(values)
    return Reconstruction(TAH_QUANT.decode(message, values.shape, torch.float32), 8 * message.numel())


BASELINES: dict[str, Baseline] = {
    "INT8 per tensor": int8_per_tensor,
    "FP8 E4M3 per tensor": fp8_per_tensor,
    "FP8 E4M3 per row": fp8_per_row,
    "FP8 E4M3 unscaled": fp8_unscaled,
    "rotation alone: Hadamard 128, FP8 E4M3 per tensor": rotation_fp8_per_tensor,
    "TAH-Quant, 3 and 4 bits, tiles of 64": tah_quant,
}


def _scale(amax: Tensor, code_max: float) -> Tensor:
    """What a code of 1 is worth; 1 where all values are zero."""
    scale = amax / code_max
    return torch.where(scale > 0, scale, 1.0)


def _e4m3(values: Tensor) -> Tensor:
    return values.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float()


def _e4m3_scaled(values: Tensor, amax: Tensor) -> Tensor:
    scale = _scale(amax, E4M3_MAX)
    return _e4m3(values / scale) * scale


def _rotate(blocks: Tensor) -> Tensor:
    """The orthonormal Hadamard matrix along the last dim; its own inverse."""
    return hadamard_transform_reference(blocks) / math.sqrt(blocks.shape[-1])
