"""Arguments that both strategies take, refused before any process does any work."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from lightning_taco import _compat
from lightning_taco.config import CompressionConfig, resolve_compression
from lightning_taco.data_parallel import DataParallelConfig, resolve_data_parallel


def checked_compression(compression: CompressionConfig | Mapping[str, Any] | str | None) -> CompressionConfig | None:
    """The settings, under a torch that they work with.

    Raises:
        ValueError: for an unknown recipe, codec or block size.
        RuntimeError: when something would be compressed under a torch that is not known.
    """
    config = resolve_compression(compression)
    if config is not None and not config.is_empty:
        _compat.require_known_torch()
    return config


def checked_data_parallel(
    data_parallel: DataParallelConfig | Mapping[str, Any] | str | None,
) -> DataParallelConfig | None:
    """The settings of data parallelism, under a torch whose FSDP2 they work with.

    Raises:
        ValueError: for an unknown recipe, codec or field.
        RuntimeError: when something would be compressed under a torch that is not known.
    """
    config = resolve_data_parallel(data_parallel)
    if config is not None:
        _compat.require_known_torch()
    return config


def checked_timeout(timeout: timedelta | float | None) -> timedelta | None:
    """A time limit of collectives; numbers are seconds.

    Raises:
        ValueError: for a limit that is not above zero.
    """
    if timeout is None:
        return None
    limit = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
    if limit <= timedelta(0):
        raise ValueError(f"timeout={timeout!r} is not above zero; give seconds, or a datetime.timedelta.")
    return limit


def checked_sampling(sample_every_n_steps: int) -> int:
    """Steps between measurements of the reconstruction error.

    Raises:
        ValueError: for anything but an integer from 0 up.
    """
    if isinstance(sample_every_n_steps, bool) or not isinstance(sample_every_n_steps, int) or sample_every_n_steps < 0:
        raise ValueError(
            f"sample_every_n_steps={sample_every_n_steps!r} is not a number of steps; use an integer from 1 up, or 0 "
            "to measure no reconstruction error."
        )
    return sample_every_n_steps
