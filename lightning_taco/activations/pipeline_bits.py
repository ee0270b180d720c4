"""Bits of stored activations by pipeline stage: what later stages have to spare (AGoQ's DBCA-PP).

The first stage of a pipeline holds the activations of most micro-batches at once, the last of fewest. A stage that
holds a half of them can store each in twice the bits within the same memory.
"""

from __future__ import annotations

from typing import Literal

Schedule = Literal["1f1b", "interleaved"]
Rounding = Literal["floor", "nearest"]
SCHEDULES = ("1f1b", "interleaved")
ROUNDINGS = ("floor", "nearest")
FEWEST_BITS = 4
STORABLE_BITS = (4, 5, 6, 8)
"""Those that have a format; the last is the most that is worth having."""


def live_micro_batches(
    num_stages: int, stage: int, schedule: Schedule = "1f1b", num_chunks: int = 1, num_micro_batches: int | None = None
) -> int:
    """Micro-batches (of one chunk of layers) whose activations a stage holds at once, at most.

    Args:
        num_stages: n, ranks along the pipeline.
        stage: from 0, the first.
        schedule: ``"1f1b"``, or ``"interleaved"``: each rank holds `num_chunks` chunks of layers.
        num_chunks: v, chunks of layers of a rank; 1 for ``"1f1b"``.
        num_micro_batches: of one step, where there may be fewer than a stage could hold.

    Returns:
        With i = stage + 1: n - i + 1 for 1F1B, 2(n - i) + (v - 1)n + 1 for interleaved; not more than there are.

    Raises:
        ValueError: for an impossible argument.

    Source: AGoQ, arXiv 2605.00539, DBCA-PP.

    Example:
        >>> [live_micro_batches(4, stage) for stage in range(4)]
        [4, 3, 2, 1]
    """
    _check(num_stages, stage, schedule, num_chunks, num_micro_batches)
    place = stage + 1
    if schedule == "1f1b":
        live = num_stages - place + 1
    else:
        live = 2 * (num_stages - place) + (num_chunks - 1) * num_stages + 1
    return live if num_micro_batches is None else min(live, num_micro_batches * num_chunks)


def stage_bits(
    num_stages: int,
    stage: int,
    schedule: Schedule = "1f1b",
    num_chunks: int = 1,
    num_micro_batches: int | None = None,
    rounding: Rounding = "floor",
) -> int:
    """Bits of a stored value at one stage of a pipeline.

    Args:
        num_stages: ranks along the pipeline.
        stage: from 0, the first.
        schedule: as for `live_micro_batches`.
        num_chunks: as for `live_micro_batches`.
        num_micro_batches: as for `live_micro_batches`.
        rounding: of 4 N_1 / N_i, N the micro-batches that the first stage and this one hold: ``"floor"`` never stores
            more than the first stage does; ``"nearest"`` is the paper's, which may.

    Returns:
        4, 5, 6 or 8: the most of these that the rounded quotient allows (there is no format of 7).

    Raises:
        ValueError: for an impossible argument.

    Source: AGoQ, arXiv 2605.00539, DBCA-PP. Its 4, 5, 6, 8 for four stages are ``"nearest"`` for the interleaved
    schedule with two chunks, whose second stage then holds 9 * 5 = 45 where the first holds 11 * 4 = 44; ``"floor"``
    gives 4, 4, 6, 8. Plain 1F1B leaves more: 4, 5, 8, 8.

    Example:
        >>> [stage_bits(4, stage) for stage in range(4)]
        [4, 5, 8, 8]
        >>> [stage_bits(4, stage, "interleaved", 2) for stage in range(4)]
        [4, 4, 6, 8]
        >>> [stage_bits(4, stage, "interleaved", 2, rounding="nearest") for stage in range(4)]
        [4, 5, 6, 8]
    """
    if rounding not in ROUNDINGS:
        raise ValueError(f"rounding={rounding!r} is not supported; use one of {_listed(ROUNDINGS)}.")
    first = live_micro_batches(num_stages, 0, schedule, num_chunks, num_micro_batches)
    here = live_micro_batches(num_stages, stage, schedule, num_chunks, num_micro_batches)
    budget = FEWEST_BITS * first
    allowed = budget // here if rounding == "floor" else (2 * budget + here) // (2 * here)
    return max(bits for bits in STORABLE_BITS if bits <= allowed)


def pipeline_bits(
    num_stages: int,
    schedule: Schedule = "1f1b",
    num_chunks: int = 1,
    num_micro_batches: int | None = None,
    rounding: Rounding = "floor",
) -> tuple[int, ...]:
    """`stage_bits` of every stage, for a table."""
    return tuple(
        stage_bits(num_stages, stage, schedule, num_chunks, num_micro_batches, rounding) for stage in range(num_stages)
    )


def _check(num_stages: int, stage: int, schedule: str, num_chunks: int, num_micro_batches: int | None) -> None:
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule={schedule!r} is not supported; use one of {_listed(SCHEDULES)}.")
    if num_stages < 1:
        raise ValueError(f"num_stages={num_stages} is not a number of stages; use an integer from 1 up.")
    if not 0 <= stage < num_stages:
        raise ValueError(f"stage={stage} is not one of {num_stages} stages; use 0 to {num_stages - 1}.")
    if num_chunks < 1 or (schedule == "1f1b" and num_chunks != 1):
        raise ValueError(
            f"num_chunks={num_chunks} does not fit schedule={schedule!r}; use 1 for '1f1b', or 'interleaved' with the "
            "chunks of layers that a rank holds."
        )
    if num_micro_batches is not None and num_micro_batches < 1:
        raise ValueError(f"num_micro_batches={num_micro_batches} is not a number of them; use an integer from 1 up.")


def _listed(values: tuple[str, ...]) -> str:
    return ", ".join(map(repr, values))
