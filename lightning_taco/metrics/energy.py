"""The arithmetic that all figures are made of: energies (sums of squares) in float64, and their ratios."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def energy(values: Tensor) -> Tensor:
    """Sum of squares, float64, 0-dim: neither 1e-30 nor 1e30 is lost. Cost: one pass."""
    return torch.linalg.vector_norm(values, dtype=torch.float64).square()


def ratio(part: float, whole: float) -> float:
    """`part` over `whole`; 0 for 0 over 0, and infinite for anything else over 0."""
    if whole == 0:
        return 0.0 if part == 0 else math.inf
    return part / whole


def decibels(relative_error: float) -> float:
    """``20 log10`` of a relative error; minus infinity for none."""
    return -math.inf if relative_error == 0 else 20 * math.log10(relative_error)
