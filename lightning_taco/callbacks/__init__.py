"""Callbacks that watch a compressed run."""

from lightning_taco.callbacks.compression_guard import CompressionGuard
from lightning_taco.callbacks.compression_monitor import CompressionMonitor
from lightning_taco.callbacks.compression_schedule import CompressionSchedule
from lightning_taco.callbacks.gradient_norm_monitor import GradientNormMonitor
from lightning_taco.callbacks.run_logger import RunLogger
from lightning_taco.callbacks.throughput_report import ThroughputReport

__all__ = [
    "CompressionGuard",
    "CompressionMonitor",
    "CompressionSchedule",
    "GradientNormMonitor",
    "RunLogger",
    "ThroughputReport",
]
