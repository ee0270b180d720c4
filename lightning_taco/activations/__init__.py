"""Stored activations in few bits: what backward needs is kept as 4-bit messages, or recomputed from them (AGoQ)."""

from lightning_taco.activations.apply import StoredActivations, store_in_few_bits
from lightning_taco.activations.ledger import Ledger, StoredBytes
from lightning_taco.activations.measure import MemoryReport, measure_stored
from lightning_taco.activations.pipeline_bits import live_micro_batches, pipeline_bits, stage_bits
from lightning_taco.activations.predict import BlockSizes, predict_block
from lightning_taco.activations.settings import ActivationConfig, resolve_activations

__all__ = [
    "ActivationConfig",
    "BlockSizes",
    "Ledger",
    "MemoryReport",
    "StoredActivations",
    "StoredBytes",
    "live_micro_batches",
    "measure_stored",
    "pipeline_bits",
    "predict_block",
    "resolve_activations",
    "stage_bits",
    "store_in_few_bits",
]
