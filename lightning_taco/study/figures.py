"""What a codec does to a message, in numbers: sums over messages, and the figures that are made of them.

Pure functions of tensors. A message is looked at once and only sums of it are kept, as float64 vectors on its device:
neither 1e-30 nor 1e30 is lost, and nothing waits for the device. Sums of messages and ranks add up; `figures_of`
turns them into figures at the end.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

# `as`: they are part of what this module gives to the others of the study.
from lightning_taco.metrics.energy import decibels as decibels
from lightning_taco.metrics.energy import energy
from lightning_taco.metrics.energy import ratio as ratio


class MessageSums(NamedTuple):
    """Sums of messages alone, the same for all codecs. All but the counts are energies, sums of squares."""

    num_values: float
    energy: float
    """Of the messages."""
    small_energy: float
    """Of the half of the values of each message with the smallest magnitude."""
    num_nonzero: float
    result_energy: float
    """Of what the exact exchange gives."""
    reduced_energy: float
    """Of the exact sum over ranks, each value counted once; 0 for exchanges that reduce nothing."""
    num_finite: float
    """Messages looked at."""
    num_nonfinite: float
    """Messages left out, since a rank's part held a NaN or an Inf."""


class CodecSums(NamedTuple):
    """Sums of what one codec made of the messages."""

    num_bits: float
    error_energy: float
    small_error_energy: float
    num_zeroed: float
    """Values other than zero that became zero."""
    error_in_rms: float
    """Sum of the errors, each divided by the root mean square of its message."""
    slope: float
    """Inner product of the errors and the values."""
    result_error_energy: float
    """Of what the exchange gave, against the exact one."""


@dataclass(frozen=True)
class Figures:
    """What a codec does to messages, for one site, one direction, or both directions together.

    Attributes:
        bits_per_value: on the wire, scales and padding included.
        relative_l2_error: ``||x' - x|| / ||x||`` of one quantisation, each message weighed by its energy.
        small_half_error: the same over the half of the values of each message that have the smallest magnitude.
        zeroed_share: of the values that are not zero, the part that becomes zero.
        bias: mean of ``x' - x`` in units of the root mean square of x; unbiased is 0, up to noise of about
            `relative_l2_error` over the square root of the number of values.
        slope_bias: ``<x' - x, x> / <x, x>``: -0.01 is a message that arrives 1% too small.
        exchange_error: relative L2 error of what comes out of the whole exchange, against the exact fp32 one.
    """

    bits_per_value: float
    relative_l2_error: float
    small_half_error: float
    zeroed_share: float
    bias: float
    slope_bias: float
    exchange_error: float


@dataclass(frozen=True)
class Message:
    """One rank's part of an exchange, with what all codecs are measured by.

    Attributes:
        values: fp32 ``[N]``.
        in_rms: `values` over their root mean square; products with it neither overflow nor vanish.
        rms: fp32, 0-dim; 1 for a message of zeros.
        is_small: bool ``[N]``, the half of the values with the smallest magnitude; values that tie with the largest of
            them are in.
    """

    values: Tensor
    in_rms: Tensor
    rms: Tensor
    is_small: Tensor

    @staticmethod
    def of(tensor: Tensor) -> Message:
        """The message `tensor`, of any shape but not empty. Cost: about six passes, and a selection of the median."""
        values = tensor.detach().float().reshape(-1)
        rms = (energy(values) / values.numel()).sqrt().float()
        rms = torch.where(rms > 0, rms, 1.0)
        magnitudes = values.abs()
        border = magnitudes.kthvalue(max(1, values.numel() // 2)).values
        return Message(values, values / rms, rms, magnitudes <= border)


def message_sums(message: Message, result: Tensor, reduced_energy: Tensor | float) -> Tensor:
    """`MessageSums` of one message as a float64 vector.

    Args:
        message: the message.
        result: what the exact exchange gives.
        reduced_energy: as in `MessageSums`.
    """
    values = message.values
    return _vector(
        MessageSums,
        values.device,
        num_values=values.numel(),
        energy=energy(values),
        small_energy=energy(torch.where(message.is_small, values, 0.0)),
        num_nonzero=values.count_nonzero(),
        result_energy=energy(result),
        reduced_energy=reduced_energy,
        num_finite=1,
        num_nonfinite=0,
    )


def nonfinite_sums(device: torch.device) -> Tensor:
    """`MessageSums` of a message that is left out: nothing but its count."""
    counts = dict.fromkeys(MessageSums._fields, 0.0) | {"num_nonfinite": 1.0}
    return _vector(MessageSums, device, **counts)


def codec_sums(
    message: Message, decoded: Tensor, num_bits: Tensor | float, result: Tensor, exact_result: Tensor
) -> Tensor:
    """`CodecSums` of one message as a float64 vector.

    Args:
        message: the message.
        decoded: fp32, as many values: the message after one quantisation.
        num_bits: that it took.
        result: fp32, what the exchange gave.
        exact_result: fp32, what the exact one gives.

    Cost: about ten passes over the values.
    """
    values, decoded = message.values, decoded.reshape(-1)
    error = decoded - values
    return _vector(
        CodecSums,
        values.device,
        num_bits=num_bits,
        error_energy=energy(error),
        small_error_energy=energy(torch.where(message.is_small, error, 0.0)),
        num_zeroed=((decoded == 0) & (values != 0)).sum(),
        error_in_rms=(error / message.rms).sum(dtype=torch.float64),
        slope=(error * message.in_rms).sum(dtype=torch.float64) * message.rms,
        result_error_energy=energy(result - exact_result),
    )


def figures_of(messages: MessageSums, codec: CodecSums) -> Figures:
    """The figures of messages, from the sums of them and of what a codec made of them."""
    return Figures(
        bits_per_value=ratio(codec.num_bits, messages.num_values),
        relative_l2_error=math.sqrt(ratio(codec.error_energy, messages.energy)),
        small_half_error=math.sqrt(ratio(codec.small_error_energy, messages.small_energy)),
        zeroed_share=ratio(codec.num_zeroed, messages.num_nonzero),
        bias=ratio(codec.error_in_rms, messages.num_values),
        slope_bias=ratio(codec.slope, messages.energy),
        exchange_error=math.sqrt(ratio(codec.result_error_energy, messages.result_energy)),
    )


def overall(parts: list[Figures]) -> Figures:
    """Figures of both directions with the same weight for each: root mean square of errors, mean of the others.

    Added up by energy, gradients of 1e-6 beside activations of 1 would count for nothing.
    """

    def mean(name: str) -> float:
        return sum(getattr(part, name) for part in parts) / len(parts)

    def root_mean_square(name: str) -> float:
        return math.sqrt(sum(getattr(part, name) ** 2 for part in parts) / len(parts))

    return Figures(
        bits_per_value=mean("bits_per_value"),
        relative_l2_error=root_mean_square("relative_l2_error"),
        small_half_error=root_mean_square("small_half_error"),
        zeroed_share=mean("zeroed_share"),
        bias=mean("bias"),
        slope_bias=mean("slope_bias"),
        exchange_error=root_mean_square("exchange_error"),
    )


def cancellation(messages: MessageSums) -> float | None:
    """``sum_i ||x_i||^2 / ||sum_i x_i||^2`` over ranks i; ``None`` for exchanges that add nothing.

    1 for parts that have nothing to do with each other, 1/P for P equal ones. Above 1 they cancel, and an error of the
    parts weighs by its root more in the sum.
    """
    if messages.reduced_energy == 0:
        return None
    return messages.energy / messages.reduced_energy


def _vector(sums: type[MessageSums] | type[CodecSums], device: torch.device, **values: Tensor | float) -> Tensor:
    """float64, the fields of `sums` in their order."""
    return torch.stack([torch.as_tensor(values[name], dtype=torch.float64, device=device) for name in sums._fields])
