"""Quantisers that the codecs are measured against: what others send, written in plain torch, for error only.

Each is a function of a tensor that returns what a receiver would hold and the bits that were sent for it. They have no
wire format and no kernel; none can be chosen for a run.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_taco.codec.reference import hadamard_transform_reference

E4M3_MAX = 448.0
INT8_MAX = 127.0
FP32_BITS = 32
ROTATED_VALUES = 128
TILE = 64
TILE_PIVOT_BITS = 6
LOW_ENTROPY_SHARE = 0.2
FEW_BITS, MANY_BITS = 3, 4


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
    """TAH-Quant, made for activations between pipeline stages, used for tensor-parallel messages.

    1. The entropy of a token is that of ``|a| / sum |a|`` over its channels. In each sample the 20% of the tokens
       (rounded down) with the lowest take 3 bits a value, the others 4.
    2. A tile is 64 neighbouring channels of a token. If its largest magnitude is at least twice the second largest, the
       two values at position 0 and at the largest change places and the tile is rotated by the orthonormal Hadamard
       matrix; else it stays as it is.
    3. Each tile is rounded to nearest between its minimum and its maximum, with scale and minimum in fp16.

    Sent for a tile are its codes, 32 bits of scale and minimum, one flag, and for a rotated tile the 6-bit place of
    the largest; for a token, one bit. A last tile of fewer channels is filled up with zeros, which are not sent.

    Args:
        values: fp32 ``[samples, ..., channels]``, tokens between; ``[tokens, channels]`` counts as one sample.

    Cost: about 40 passes over the values; a study only.

    Source: TAH-Quant, arXiv 2506.01352. What fp16 cannot hold is lost here as it is there: steps below 6e-8 become
    zero, so that a tile of small gradients arrives as one value, and beyond 65504 it is infinite.
    """
    num_channels = values.shape[-1]
    tokens = values.reshape(1 if values.dim() == 2 else values.shape[0], -1, num_channels)
    bits = _bits_by_entropy(tokens)  # [samples, tokens]
    tiles = F.pad(tokens, (0, -num_channels % TILE)).unflatten(-1, (-1, TILE))
    largest, places = tiles.abs().topk(2, dim=-1)
    is_rotated = largest[..., :1] >= 2 * largest[..., 1:]
    pivot = places[..., :1]
    coded = torch.where(is_rotated, _rotate(_swap_with_first(tiles, pivot)), tiles)
    decoded = _asymmetric(coded, num_steps=torch.exp2(bits)[..., None, None] - 1)
    decoded = torch.where(is_rotated, _swap_with_first(_rotate(decoded), pivot), decoded)
    num_bits = (
        bits.sum() * num_channels
        + is_rotated.sum() * TILE_PIVOT_BITS
        + is_rotated.numel() * (FP32_BITS + 1)
        + bits.numel()
    )
    return Reconstruction(decoded.flatten(-2)[..., :num_channels].reshape(values.shape), num_bits)


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


def _bits_by_entropy(tokens: Tensor) -> Tensor:
    """Bits a value of each token, fp32 ``[samples, tokens]``, from ``[samples, tokens, channels]``."""
    magnitudes = tokens.abs()
    shares = magnitudes / magnitudes.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    entropy = torch.special.entr(shares).sum(-1)
    num_low = int(LOW_ENTROPY_SHARE * tokens.shape[1])
    lowest = entropy.argsort(dim=1, stable=True)[:, :num_low]
    return torch.full_like(entropy, MANY_BITS).scatter(1, lowest, FEW_BITS)


def _swap_with_first(tiles: Tensor, place: Tensor) -> Tensor:
    """Exchange the values at position 0 and at `place`, ``[..., 1]``, of each tile; its own inverse."""
    at_place = tiles.gather(-1, place)
    swapped = tiles.scatter(-1, place, tiles[..., :1])
    return torch.cat([at_place, swapped[..., 1:]], dim=-1)


def _asymmetric(tiles: Tensor, num_steps: Tensor) -> Tensor:
    """Round each tile to `num_steps` even steps from its minimum to its maximum, both numbers in fp16."""
    smallest, largest = tiles.amin(-1, keepdim=True), tiles.amax(-1, keepdim=True)
    zero = smallest.half().float()
    step = ((largest - smallest) / num_steps).half().float()
    codes = ((tiles - zero) / torch.where(step > 0, step, 1.0)).round()
    return torch.minimum(codes.clamp(min=0), num_steps) * step + zero
