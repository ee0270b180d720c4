"""Compressed collectives over a process group, their transports, and counters of what they send."""

from lightning_taco.collectives.compressed import all_gather, all_reduce, all_to_all, reduce_scatter
from lightning_taco.collectives.traffic import TrafficCount, TrafficCounters, TrafficKey
from lightning_taco.collectives.transport import ProcessGroupTransport, Transport

__all__ = [
    "ProcessGroupTransport",
    "TrafficCount",
    "TrafficCounters",
    "TrafficKey",
    "Transport",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "reduce_scatter",
]
