"""Cutting an exchange in slices whose stages overlap."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from torch import Tensor

MAX_SLICES = 3
MIN_SLICE_VALUES = 1 << 24
"""Values, for all ranks together, below which a slice costs more than it hides."""


def column_slices(rows: Tensor, block_size: int, num_slices: int | None) -> list[tuple[int, int]]:
    """Where to cut the columns of `rows` ``[P, N]``: starts and stops at multiples of `block_size`.

    Args:
        rows: the values.
        block_size: of the codec.
        num_slices: how many at most; left out, 1 to 3 by the number of values.
    """
    num_values = rows.shape[1]
    if num_slices is None:
        num_slices = max(1, min(MAX_SLICES, rows.numel() // MIN_SLICE_VALUES))
    num_blocks = -(-num_values // block_size)
    width = max(1, -(-num_blocks // num_slices)) * block_size
    return [(start, min(start + width, num_values)) for start in range(0, num_values, width)]


def advance_staggered(pieces: Iterable[Iterator[None]]) -> None:
    """Run `pieces`, each of which stops after starting an exchange, so that each is one stage ahead of the next.

    While the exchange of one stage of a piece is under way, the next piece is encoded and sent. The order in which
    stages start is the same on all ranks.
    """
    waiting, running = deque(pieces), deque[Iterator[None]]()
    while waiting or running:
        if waiting:
            running.appendleft(waiting.popleft())
        for piece in list(running):
            if _is_finished(piece):
                running.remove(piece)


def _is_finished(piece: Iterator[None]) -> bool:
    try:
        next(piece)
    except StopIteration:
        return True
    return False
