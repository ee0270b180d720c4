"""Stored activations in few bits: what backward needs is kept as 4-bit messages, or recomputed from them (AGoQ)."""

from lightning_taco.activations.apply import StoredActivations, store_in_few_bits
from lightning_taco.activations.pipeline_bits import live_micro_batches, pipeline_bits, stage_bits
from lightning_taco.activations.settings import ActivationConfig, resolve_activations

__all__ = [
    "ActivationConfig",
    "StoredActivations",
    "live_micro_batches",
    "pipeline_bits",
    "resolve_activations",
    "stage_bits",
    "store_in_few_bits",
]
