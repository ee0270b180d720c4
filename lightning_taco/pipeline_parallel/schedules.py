"""Which schedules there are, on which ranks their stages lie, and how many micro-batches they take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch.distributed.pipelining as pipelining


class _Kind(NamedTuple):
    schedule: type[Any]
    stages_per_rank: int
    is_v: bool = False


_KINDS = {
    "GPipe": _Kind(pipelining.ScheduleGPipe, 1),
    "1F1B": _Kind(pipelining.Schedule1F1B, 1),
    "LoopedBFS": _Kind(pipelining.ScheduleLoopedBFS, 2),
    "Interleaved1F1B": _Kind(pipelining.ScheduleInterleaved1F1B, 2),
    "InterleavedZeroBubble": _Kind(pipelining.ScheduleInterleavedZeroBubble, 2),
    "ZBVZeroBubble": _Kind(pipelining.ScheduleZBVZeroBubble, 2, is_v=True),
}
Schedule = Literal["GPipe", "1F1B", "LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"]
SCHEDULES: tuple[str, ...] = get_args(Schedule)
SPLIT_BACKWARD = ("InterleavedZeroBubble", "ZBVZeroBubble")
"""Those that compute gradients of inputs and of weights apart."""


@dataclass(frozen=True)
class Layout:
    """The stages of a pipeline.

    Attributes:
        schedule: by which they run.
        ranks: of each stage, the rank along the pipeline axis that holds it.
    """

    schedule: str
    ranks: tuple[int, ...]

    @property
    def num_stages(self) -> int:
        """Of the whole pipeline."""
        return len(self.ranks)

    @property
    def num_ranks(self) -> int:
        """Along the pipeline axis."""
        return max(self.ranks) + 1

    @property
    def has_several_stages_a_rank(self) -> bool:
        """Whether a rank holds more than one stage."""
        return self.num_stages > self.num_ranks

    def stages_of(self, rank: int) -> list[int]:
        """The stages that `rank` holds, in order."""
        return [stage for stage, owner in enumerate(self.ranks) if owner == rank]


def make_layout(schedule: str, num_ranks: int, num_stages: int | None = None) -> Layout:
    """The layout of `schedule` over `num_ranks`.

    Args:
        schedule: one of `SCHEDULES`.
        num_ranks: along the pipeline axis.
        num_stages: of the whole pipeline; by default one or two for each rank, as the schedule is made for.

    Raises:
        ValueError: for an unknown schedule, or a number of stages that it cannot run.
    """
    if schedule not in _KINDS:
        raise ValueError(f"pipeline_schedule={schedule!r} is not known; use one of {', '.join(map(repr, SCHEDULES))}.")
    kind = _KINDS[schedule]
    stages = kind.stages_per_rank * num_ranks if num_stages is None else num_stages
    per_rank = stages // num_ranks
    is_free = kind.stages_per_rank > 1 and not kind.is_v
    if stages % num_ranks or (per_rank < 2 if is_free else per_rank != kind.stages_per_rank):
        needed = "two or more" if is_free else {1: "one", 2: "two"}[kind.stages_per_rank]
        raise ValueError(
            f"pipeline_split makes {stages} stages for pipeline_parallel_size={num_ranks}, but {schedule} needs "
            f"{needed} for each rank; give {kind.stages_per_rank * num_ranks - 1} indices."
        )
    ranks = [stage % num_ranks for stage in range(stages)]
    if kind.is_v:
        ranks = [*range(num_ranks), *reversed(range(num_ranks))]
    return Layout(schedule, tuple(ranks))


def num_usable(batch_size: int, wanted: int, layout: Layout) -> int:
    """How many equal micro-batches `batch_size` samples make: at most `wanted`, as many as possible."""
    return next(n for n in range(min(wanted, batch_size), 0, -1) if batch_size % n == 0 and _takes(layout, n))


def _takes(layout: Layout, num_microbatches: int) -> bool:
    if layout.schedule not in ("Interleaved1F1B", "InterleavedZeroBubble"):
        return True
    return num_microbatches % max(1, num_microbatches // layout.num_ranks) == 0


def check_num_microbatches(num_microbatches: int, layout: Layout) -> None:
    """Refuse a number that the schedule cannot run.

    Raises:
        ValueError: with numbers that it can.
    """
    if not _takes(layout, num_microbatches):
        size = layout.num_ranks
        near = f"{num_microbatches // size * size} or {(num_microbatches // size + 1) * size}"
        raise ValueError(
            f"{layout.schedule} runs micro-batches in rounds of pipeline_parallel_size={size}, into which "
            f"num_microbatches={num_microbatches} does not go; use {near}."
        )


def make_schedule(
    stages: list[Any], layout: Layout, num_microbatches: int, loss: Callable[..., Any], *, is_training: bool
) -> Any:
    """The schedule of torch that runs `stages`, this rank's.

    1F1B cannot run fewer micro-batches than stages, and is no better than GPipe without a backward: GPipe runs then.
    """
    if layout.has_several_stages_a_rank:
        return _KINDS[layout.schedule].schedule(stages, num_microbatches, loss_fn=loss, scale_grads=False)
    is_one_by_one = is_training and num_microbatches >= layout.num_stages
    kind = _KINDS[layout.schedule if is_one_by_one else "GPipe"]
    return kind.schedule(stages[0], num_microbatches, loss_fn=loss, scale_grads=False)
