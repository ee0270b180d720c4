"""Arguments of pipeline parallelism, refused before any process does any work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_taco.data_parallel import DataParallelConfig
from lightning_taco.pipeline_parallel import PipelineConfig, resolve_pipeline
from lightning_taco.pipeline_parallel.schedules import SPLIT_BACKWARD


@dataclass(frozen=True)
class PipelineArguments:
    """What a user says of a pipeline.

    Attributes:
        size: ranks along the pipeline axis.
        schedule: name of the schedule.
        num_microbatches: into how many a batch is cut.
        split: the first layer of each stage but the first; ``None`` balances parameters.
        config: what is compressed between stages.
    """

    size: int
    schedule: str
    num_microbatches: int
    split: tuple[int, ...] | None
    config: PipelineConfig | None

    @property
    def num_stages(self) -> int | None:
        """As many as `split` makes; ``None`` for as many as the schedule is made for."""
        return None if self.split is None or self.size == 1 else len(self.split) + 1


def checked_pipeline(
    size: int,
    schedule: str,
    num_microbatches: int | None,
    split: Sequence[int] | None,
    compression: PipelineConfig | Mapping[str, Any] | str | None,
) -> PipelineArguments:
    """The arguments of a strategy.

    Raises:
        TypeError: for a size or a number that is no integer.
        ValueError: for one below 1, or settings that do not exist.
    """
    _require_count("pipeline_parallel_size", size)
    if num_microbatches is None:
        num_microbatches = 2 * size
    _require_count("num_microbatches", num_microbatches)
    if split is not None:
        for index in split:
            _require_count("an index of pipeline_split", index)
        split = tuple(split)
    return PipelineArguments(size, schedule, num_microbatches, split, resolve_pipeline(compression))


def check_accumulation(arguments: PipelineArguments, data_parallel: DataParallelConfig | None) -> None:
    """Refuse gradients kept in few bits where torch gives weights their gradients past the hooks that keep them.

    Raises:
        ValueError: naming schedules that work.
    """
    has_accumulation = data_parallel is not None and data_parallel.accumulation is not None
    if arguments.size > 1 and has_accumulation and arguments.schedule in SPLIT_BACKWARD:
        raise ValueError(
            f"pipeline_schedule={arguments.schedule!r} gives weights their gradients apart from backward, past what "
            "keeps them in few bits (data_parallel with accumulation, such as 'quangrad'); use '1F1B' or "
            "'Interleaved1F1B', or data_parallel='tlq_hs'."
        )


def _require_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}={value!r} is not an integer; give one from 1 up.")
    if value < 1:
        raise ValueError(f"{name}={value} is below 1; give an integer from 1 up.")
