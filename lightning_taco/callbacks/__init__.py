"""Callbacks that watch a compressed run."""

from lightning_taco.callbacks.compression_monitor import CompressionMonitor
from lightning_taco.callbacks.gradient_norm_monitor import GradientNormMonitor

__all__ = ["CompressionMonitor", "GradientNormMonitor"]
