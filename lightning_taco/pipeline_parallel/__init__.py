"""Pipeline parallelism on `torch.distributed.pipelining`, with compressed transfers between stages.

Knows no Lightning: `cut` leaves each rank its layers, a `PipelineEngine` runs a user's step through the pipeline.
"""

from lightning_taco.pipeline_parallel.agreement import Agreement, host_group, peers_group
from lightning_taco.pipeline_parallel.cutting import Cut, LayerOfAnotherStage, cut, cut_of, whole_names
from lightning_taco.pipeline_parallel.engine import Outcome, PipelineEngine
from lightning_taco.pipeline_parallel.failure import StageFailedError
from lightning_taco.pipeline_parallel.schedules import SCHEDULES, Layout, Schedule, check_num_microbatches, make_layout
from lightning_taco.pipeline_parallel.settings import PIPELINE_RECIPES, PipelineConfig, resolve_pipeline
from lightning_taco.pipeline_parallel.wire import BlockCodec, TransferCodec

__all__ = [
    "PIPELINE_RECIPES",
    "SCHEDULES",
    "Agreement",
    "BlockCodec",
    "Cut",
    "LayerOfAnotherStage",
    "Layout",
    "Outcome",
    "PipelineConfig",
    "PipelineEngine",
    "Schedule",
    "StageFailedError",
    "TransferCodec",
    "check_num_microbatches",
    "cut",
    "cut_of",
    "host_group",
    "make_layout",
    "peers_group",
    "resolve_pipeline",
    "whole_names",
]
