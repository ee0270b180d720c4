"""Figures of compressed tensors as torchmetrics `Metric` classes, on their own or under distributed sync."""

from lightning_taco.metrics.cancellation import Cancellation
from lightning_taco.metrics.reconstruction import (
    BitsPerValue,
    RelativeL2Error,
    SignalToQuantizationNoise,
    ZeroedShare,
)

__all__ = ["BitsPerValue", "Cancellation", "RelativeL2Error", "SignalToQuantizationNoise", "ZeroedShare"]
