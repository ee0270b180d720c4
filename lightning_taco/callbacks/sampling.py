"""The step, and every how many of them a callback does something."""

from __future__ import annotations

import lightning.pytorch as pl


def checked_every_n_steps(value: int, name: str = "every_n_steps") -> int:
    """`value`, a number of steps.

    Raises:
        ValueError: for anything but an integer from 1 up.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}={value!r} is not a number of steps; use an integer from 1 up.")
    return value


def current_step(trainer: pl.Trainer) -> int:
    """The step under which Lightning logs the loss of the batch that runs."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped
