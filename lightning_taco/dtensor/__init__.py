"""Compressed collectives under DTensor's redistribution: what to compress, the seam, and the names of sites."""

from lightning_taco.dtensor.exchange import Exchange
from lightning_taco.dtensor.scopes import bypass
from lightning_taco.dtensor.seam import install, is_installed, remove
from lightning_taco.dtensor.session import CompressionSession
from lightning_taco.dtensor.sites import Site

__all__ = ["CompressionSession", "Exchange", "Site", "bypass", "install", "is_installed", "remove"]
