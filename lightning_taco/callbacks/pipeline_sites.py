"""What the stages of a pipeline have measured, put together: sites say axis, stage and module."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from lightning_taco.strategies.pipeline import Pipeline

DIRECTIONS = ("forward", "backward")
WORST = "compression/worst_relative_error"
RATIO = "compression/ratio"
SENT = "compression/total_bytes_sent"
SAVED = "compression/total_bytes_saved"


def over_stages(values: Mapping[str, float], pipeline: Pipeline) -> dict[str, float]:
    """The values of all stages, the same on every rank of the pipeline; all of them call it.

    Args:
        values: of this rank's exchanges of tensor parallelism, by the tags of `CompressionMonitor`.
        pipeline: whose transfers are added.

    Returns:
        Tags with the axis and the stage behind the direction; the worst error of both axes, their bytes together.
    """
    mine = {_with_stage(tag, pipeline): value for tag, value in values.items()} | _of_transfers(pipeline)
    everyone = pipeline.agreement.objects(mine)
    merged = {tag: value for each in everyone for tag, value in each.items()}
    errors = [each[WORST] for each in everyone if WORST in each]
    if errors:
        merged[WORST] = _worst(errors)
    for tag in (SENT, SAVED):
        merged[tag] = sum(each.get(tag, 0.0) for each in everyone)
    merged[RATIO] = (merged[SENT] + merged[SAVED]) / merged[SENT] if merged[SENT] else 1.0
    return merged


def _with_stage(tag: str, pipeline: Pipeline) -> str:
    parts = tag.split("/", 3)
    if len(parts) < 4 or parts[2] not in DIRECTIONS:
        return tag
    what, direction, place = parts[1:]
    return f"compression/{what}/{direction}/tensor_parallel/stage_{pipeline.stage_of(place)}/{place}"


def _of_transfers(pipeline: Pipeline) -> dict[str, float]:
    values = {}
    for site, error in pipeline.errors.items():
        direction, _, place = site.partition("/")
        name = f"{direction}/pipeline_parallel/{place}/send"
        values[f"compression/relative_error/{name}"] = error
        values[f"compression/decibels/{name}"] = 20 * math.log10(error) if error > 0 else -math.inf
    return values


def _worst(errors: Iterable[float]) -> float:
    errors = list(errors)
    return math.inf if any(math.isnan(error) for error in errors) else max(errors)
