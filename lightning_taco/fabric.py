"""For Fabric: ``lightning_taco.fabric.TacoTPStrategy(parallelize_fn)``."""

from lightning_taco.strategies.fabric import TacoTPStrategy

__all__ = ["TacoTPStrategy"]
