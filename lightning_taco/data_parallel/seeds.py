"""Seeds of stochastic rounding: one for each place in a run at which values are rounded."""

from __future__ import annotations

import zlib

from lightning_taco.collectives.compressed import SEED_RANGE, SEED_STEP


def derived_seed(seed: int, *places: int) -> int:
    """A seed of its own for each sequence of `places` (step, slice, level, rank), from 0 to 2^62 - 1.

    >>> derived_seed(0, 1, 2) == derived_seed(0, 1, 2), derived_seed(0, 1, 2) == derived_seed(0, 2, 1)
    (True, False)
    """
    for place in places:
        seed = ((seed ^ (seed >> 31)) * SEED_STEP + place + 1) % SEED_RANGE
    return seed


def site_seed(seed: int, site: str) -> int:
    """The seed of a module or bucket by its name."""
    return derived_seed(seed, zlib.crc32(site.encode()))
