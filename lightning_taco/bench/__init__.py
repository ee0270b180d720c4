"""``lightning-taco bench``: from which sizes on compressed exchanges are faster on this machine."""

from lightning_taco.bench.command import bench

__all__ = ["bench"]
