"""One checkpoint of a model whose stages lie on different ranks, with the names of the whole model.

It is what Lightning's strategy would write of the whole: weights and optimizer state by the parameters' names, in a
folder with a file for each rank or in one file. So it loads at any number of stages, and without a pipeline.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.strategies.model_parallel import (
    _METADATA_FILENAME,
    _distributed_checkpoint_load,
    _is_sharded_checkpoint,
)
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_taco.pipeline_parallel import Agreement, whole_names
from lightning_taco.strategies.checkpoints import distributed_like, saved_name


def with_groups_of_all_stages(state: dict[str, Any], agreement: Agreement) -> dict[str, Any]:
    """`state`, one rank's of an optimizer by names, with the parameters of all stages in each of its groups."""
    stages = agreement.objects([group["params"] for group in state["param_groups"]])
    groups = [
        {**group, "params": [name for stage in stages for name in stage[place]]}
        for place, group in enumerate(state["param_groups"])
    ]
    return {**state, "param_groups": groups}


def whole_weights(module: nn.Module, agreement: Agreement, is_needed: bool) -> dict[str, Any]:
    """Weights of all stages on rank 0 of the run, nothing elsewhere. All ranks call it.

    Cost: one weight at a time is whole on a device; the stages' are gathered on the host of each rank of a pipeline.
    """
    stage = {saved_name(name): _whole(value) for name, value in module.state_dict().items()}
    whole = {name: value for each in agreement.objects(stage) for name, value in each.items()}
    return whole if is_needed else {}


def whole_optimizer_state(
    module: nn.Module, optimizer: Optimizer, agreement: Agreement, is_needed: bool
) -> dict[str, Any]:
    """The same of an optimizer, whose parameters have the numbers that they have in the whole model."""
    state: dict[str, Any] = get_optimizer_state_dict(module, optimizer)  # type: ignore[assignment]
    stage = {name: {key: _whole(value) for key, value in each.items()} for name, each in state["state"].items()}
    stages = agreement.objects(stage)
    groups = with_groups_of_all_stages(state, agreement)["param_groups"]
    if not is_needed:
        return {}
    numbers = {saved_name(name): number for number, name in enumerate(whole_names(module))}
    return {
        "state": {numbers[name]: value for each in stages for name, value in each.items()},
        "param_groups": [{**group, "params": sorted(numbers[name] for name in group["params"])} for group in groups],
    }


def load(
    path: Path, module: nn.Module, optimizers: Sequence[Optimizer], *, strict: bool, weights_only: bool | None
) -> dict[str, Any]:
    """Load this rank's part of weights and optimizer states; returns all else that the checkpoint holds.

    Raises:
        ValueError: for a path that is no checkpoint.
    """
    if _is_sharded_checkpoint(path):
        weights = {"state_dict": get_model_state_dict(module)}
        _distributed_checkpoint_load(weights, path)
        module.load_state_dict(weights["state_dict"], strict=strict)
        saved = FileSystemReader(path).read_metadata().state_dict_metadata
        for place, optimizer in enumerate(optimizers):
            _load_sharded(path, module, optimizer, f"optimizer_{place}", saved)
        return torch.load(path / _METADATA_FILENAME, weights_only=weights_only)
    if not path.is_file():
        raise ValueError(f"{path} is neither a folder with a distributed checkpoint nor a file with a whole one.")
    checkpoint = torch.load(path, mmap=True, map_location="cpu", weights_only=weights_only)
    _load_whole_weights(checkpoint.pop("state_dict"), module, strict=strict)
    for optimizer, state in zip(optimizers, checkpoint["optimizer_states"], strict=False):
        _load_whole_state(state, module, optimizer)
    return checkpoint


def _load_sharded(path: Path, module: nn.Module, optimizer: Optimizer, name: str, saved: dict[str, Any]) -> None:
    local = get_optimizer_state_dict(module, optimizer)
    groups: dict[int, dict[str, Any]] = {}
    for key, value in saved.items():
        match = re.fullmatch(rf"{name}\.param_groups\.(\d+)\.(.+)", key)
        if match is not None:
            is_tensor = isinstance(value, TensorStorageMetadata)
            empty: Any = torch.empty(value.size, dtype=value.properties.dtype) if is_tensor else []
            groups.setdefault(int(match[1]), {})[match[2]] = empty
    state: dict[str, Any] = {
        name: {"state": local["state"], "param_groups": [groups[place] for place in sorted(groups)]}
    }
    _distributed_checkpoint_load(state, path)
    _put(state[name]["state"], state[name]["param_groups"], module, optimizer)


def _load_whole_weights(whole: dict[str, Tensor], module: nn.Module, *, strict: bool) -> None:
    own = module.state_dict()
    missing = [name for name in own if saved_name(name) not in whole]
    if missing and strict:
        raise KeyError(
            f"The model has {missing[0]!r}, which is not in the checkpoint; load with strict_loading = False to leave "
            "it as it is."
        )
    parts = {
        name: distributed_like(value, whole[saved_name(name)]) for name, value in own.items() if name not in missing
    }
    module.load_state_dict(parts, strict=strict)


def _load_whole_state(whole: dict[str, Any], module: nn.Module, optimizer: Optimizer) -> None:
    names = {number: saved_name(name) for number, name in enumerate(whole_names(module))}
    states = {names.get(key, key): value for key, value in whole["state"].items()}
    groups = [{**g, "params": [names.get(key, key) for key in g["params"]]} for g in whole["param_groups"]]
    local: dict[str, Any] = get_optimizer_state_dict(module, optimizer)["state"]  # type: ignore[assignment]
    parts = {
        name: {key: _part(value, states[name][key]) for key, value in each.items()} for name, each in local.items()
    }
    _put(parts, groups, module, optimizer)


def _put(states: dict[str, Any], groups: list[dict[str, Any]], module: nn.Module, optimizer: Optimizer) -> None:
    """Give `optimizer` the states of its parameters, and of each of its groups the settings that were saved."""
    names = {id(parameter): saved_name(name) for name, parameter in module.named_parameters()}
    state, own_groups, number = {}, [], 0
    for place, group in enumerate(optimizer.param_groups):
        first = number
        for parameter in group["params"]:
            name = names[id(parameter)]
            if name in states:
                state[number] = states[name]
            number += 1
        own = [names[id(parameter)] for parameter in group["params"]]
        saved = next((each for each in groups if set(own) & set(each["params"])), None)
        if saved is None:
            saved = groups[place] if place < len(groups) else group
        own_groups.append({**saved, "params": list(range(first, number))})
    optimizer.load_state_dict({"state": state, "param_groups": own_groups})


def _whole(value: Any) -> Any:
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return value.detach().cpu() if isinstance(value, Tensor) else value


def _part(like: Any, whole: Any) -> Any:
    return distributed_like(like, whole) if isinstance(like, Tensor) and like.dim() else whole
