"""What Lightning's checkpoints of sharded models lack: wrapped modules, averaged weights, the compression's state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.strategies.model_parallel import _distributed_checkpoint_load
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from lightning_taco.dtensor.sites import WRAPPER_PREFIXES

COMPRESSION_STATE = "lightning_taco"  # the key of the compression's state in a checkpoint; other strategies ignore it
DATA_PARALLEL_STATE = "lightning_taco_data_parallel"  # the same of what travels between data-parallel ranks
PIPELINE_STATE = "lightning_taco_pipeline"  # the same of transfers between stages
CURRENT_WEIGHTS = "current_model_state"  # what lightning's WeightAveraging calls the weights that are not averaged


def prepare_averaged_weights(checkpoint: dict[str, Any], *, is_distributed: bool) -> None:
    """Make a checkpoint to which WeightAveraging has added its own state one that can be saved from shards.

    That callback puts the average, in the shards of this rank, in place of the weights, and keeps the weights under
    another name, where only rank 0's shards would be saved.
    """
    averaged = {saved_name(name): value for name, value in checkpoint["state_dict"].items()}
    if is_distributed:
        averaged[CURRENT_WEIGHTS] = checkpoint.pop(CURRENT_WEIGHTS)
    else:
        averaged = {
            name: (value.full_tensor() if isinstance(value, DTensor) else value).cpu()
            for name, value in averaged.items()
        }
    checkpoint["state_dict"] = averaged


def add_averaged_weights(checkpoint: dict[str, Any], model: nn.Module, path: Path, names: Mapping[str, str]) -> None:
    """Give WeightAveraging, as shards of this rank, the two sets of weights that it asks a checkpoint for."""
    weights = model.state_dict()
    averaged = {name: value.detach().clone() for name, value in weights.items()}
    if path.is_dir():
        current = {name: torch.empty_like(value) for name, value in averaged.items()}
        _distributed_checkpoint_load({"state_dict": {CURRENT_WEIGHTS: current}}, path)
    else:
        current = {name: distributed_like(averaged[name], checkpoint[CURRENT_WEIGHTS][name]) for name in averaged}
    checkpoint["state_dict"] = {names[name]: value for name, value in averaged.items()}
    checkpoint[CURRENT_WEIGHTS] = {names[name]: value for name, value in current.items()}


def saved_name(name: str) -> str:
    """The name under which a parameter is saved: without the prefixes that torch.compile and others give it."""
    for prefix in WRAPPER_PREFIXES:
        name = name.replace(prefix, "")
    return name


@contextmanager
def without_wrappers(module: nn.Module) -> Iterator[None]:
    """Put modules in place of what torch.compile and CheckpointWrapper made of them: parameters have their saved names.

    Lightning's own loading knows the names with the prefixes of these wrappers only.
    """
    wrapped = [
        (parent, name, child)
        for parent in module.modules()
        for name, child in parent._modules.items()
        if child is not None and _unwrapped(child) is not child
    ]
    for parent, name, child in wrapped:
        parent._modules[name] = _unwrapped(child)
    try:
        yield
    finally:
        for parent, name, child in wrapped:
            parent._modules[name] = child


def _unwrapped(module: nn.Module) -> nn.Module:
    for prefix in WRAPPER_PREFIXES:
        inner = module._modules.get(prefix.removesuffix("."))
        if inner is not None:
            return _unwrapped(inner)
    return module


def distributed_like(like: Tensor, whole: Tensor) -> Tensor:
    """This rank's shard of `whole`, which every rank has, laid out like `like`; without an exchange."""
    whole = whole.to(like.device)
    if not isinstance(like, DTensor):
        return whole
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)
