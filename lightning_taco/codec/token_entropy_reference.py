"""Which tokens of each sample take fewer bits: those whose channels' magnitudes have the lowest entropy (TAH-Quant).

    A = sum |a|,  L = sum |a| log2 |a|       over a token's channels, in fp32
    entropy = log2 A - L / A                 = -sum p log2 p with p = |a| / A

The logarithm is a polynomial and the sums run in a fixed order, so that `codec.kernels_token_entropy` chooses the same
tokens on every device. A token of zeros has entropy 0; one whose sums are not finite, the highest.
"""

from __future__ import annotations

import torch
from torch import Tensor

# log2(1 + t) is about t (c0 + t (c1 + ... t c5)) for t from 0 to 1, within 2.3e-6 and nearly exact at both ends.
LOG2_FACTORS = (1.4425449, -0.7181453, 0.4575492, -0.2779053, 0.1217979, -0.0258414)
LANES, LANE_CHANNELS = 64, 8
"""Sums are formed in lanes, each of which has every 64th run of 8 channels."""


def few_bits_tokens_reference(tokens: Tensor, few_per_sample: int) -> Tensor:
    """Whether each token is one of its sample's `few_per_sample` with the lowest entropy; of equal ones the first.

    Args:
        tokens: bf16, fp16 or fp32, ``[samples, tokens, channels]``.
        few_per_sample: at most the tokens of a sample.

    Returns:
        bool ``[samples, tokens]``.
    """
    lowest_first = token_entropy_reference(tokens).argsort(dim=1, stable=True)
    is_few = torch.zeros(tokens.shape[:2], dtype=torch.bool, device=tokens.device)
    return is_few.scatter_(1, lowest_first[:, :few_per_sample], True)


def token_entropy_reference(tokens: Tensor) -> Tensor:
    """The entropy of each token in bits, fp32 ``[samples, tokens]``."""
    magnitudes = tokens.float().abs()
    total = _sum(magnitudes)
    weighted = _sum(magnitudes * log2_reference(magnitudes))
    entropy = (log2_reference(total) - weighted / total).clamp(min=0.0)
    entropy = torch.where(total > 0, entropy, 0.0)
    return torch.where(torch.isfinite(total) & torch.isfinite(weighted), entropy, torch.inf)


def log2_reference(values: Tensor) -> Tensor:
    """The binary logarithm of fp32 from 2^-126 up; something near -127 below that, and of zero."""
    bits = values.view(torch.int32)
    exponent = ((bits >> 23) - 127).float()
    fraction = ((bits & 0x7FFFFF) | 0x3F800000).view(torch.float32) - 1.0
    series = torch.full_like(fraction, LOG2_FACTORS[-1])
    for factor in reversed(LOG2_FACTORS[:-1]):
        series = series * fraction + factor
    return series * fraction + exponent


def _sum(values: Tensor) -> Tensor:
    """Sum over the last dim: neighbours first within a run, the runs of a lane in order, then neighbouring lanes first.

    Zeros that fill up change no bit.
    """
    chunk = LANES * LANE_CHANNELS
    filled = torch.nn.functional.pad(values, (0, -values.shape[-1] % chunk))
    runs = _pairwise_sum(filled.unflatten(-1, (-1, LANES, LANE_CHANNELS)))
    lanes = runs.new_zeros(*values.shape[:-1], LANES)
    for run in runs.unbind(-2):
        lanes = lanes + run
    return _pairwise_sum(lanes)


def _pairwise_sum(values: Tensor) -> Tensor:
    """Sum over the last dim, of a power of two, neighbours first."""
    while values.shape[-1] > 1:
        values = values[..., 0::2] + values[..., 1::2]
    return values.squeeze(-1)
