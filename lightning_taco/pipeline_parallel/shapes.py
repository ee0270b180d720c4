"""What every stage takes and returns, found out by running each once on zeros, before the first send."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_taco import _compat
from lightning_taco.pipeline_parallel.agreement import Agreement
from lightning_taco.pipeline_parallel.schedules import Layout
from lightning_taco.pipeline_parallel.transfers import TensorSpec


def specs_of(values: Sequence[Any]) -> tuple[TensorSpec, ...]:
    """Of the tensors in `values`."""
    return tuple(TensorSpec(v.shape, v.dtype, v.requires_grad) for v in values if isinstance(v, Tensor))


def outputs_by_stage(
    modules: Mapping[int, nn.Module], layout: Layout, inputs: tuple[Any, ...] | None, agreement: Agreement
) -> list[tuple[TensorSpec, ...]]:
    """What each stage but the last returns for one micro-batch. All ranks call it.

    Args:
        modules: this rank's, by stage.
        layout: of the pipeline.
        inputs: what the first stage is given, on its rank.
        agreement: between the ranks.

    Raises:
        ValueError: on every rank, where a stage does not run or returns what cannot travel.

    Cost: a forward of each stage, one after another, without gradients and in evaluation mode.
    """
    found: list[tuple[TensorSpec, ...]] = []
    for stage in range(layout.num_stages - 1):
        outcome: Any = None
        if stage in modules:
            given: Any = inputs if stage == 0 else found[-1]
            outcome = _outcome(lambda: _outputs(modules[stage], given, agreement.device), stage)  # noqa: B023
        outcome = agreement.object_of(layout.ranks[stage], outcome)
        if isinstance(outcome, str):
            raise ValueError(outcome)
        found.append(outcome)
    return found


def _outcome(run: Callable[[], tuple[TensorSpec, ...]], stage: int) -> tuple[TensorSpec, ...] | str:
    try:
        return run()
    except Exception as error:
        return f"Pipeline stage {stage} cannot run the first micro-batch: {type(error).__name__}: {error}"


def _outputs(module: nn.Module, given: Any, device: torch.device) -> tuple[TensorSpec, ...]:
    needs_grad = any(parameter.requires_grad for parameter in module.parameters())
    inputs = given
    if given and isinstance(given[0], TensorSpec):
        needs_grad = needs_grad or any(spec.requires_grad for spec in given)
        inputs = tuple(torch.zeros(spec.shape, dtype=spec.dtype, device=device) for spec in given)
    devices = [device] if device.type == "cuda" else []
    with torch.no_grad(), torch.random.fork_rng(devices), _compat.evaluation_mode(module):
        output = module(*inputs)
    outputs = tuple(output) if isinstance(output, (tuple, list)) else (output,)
    for value in outputs:
        _check_travels(value)
    return tuple(
        TensorSpec(value.shape, value.dtype, needs_grad and value.dtype.is_floating_point) for value in outputs
    )


def _check_travels(value: object) -> None:
    if isinstance(value, DTensor):
        raise TypeError(
            "it returns a DTensor, but plain tensors travel between stages; give its last parallel style "
            "use_local_output=True"
        )
    if not isinstance(value, Tensor):
        raise TypeError(
            f"it returns a {type(value).__name__}, but a tensor or a tuple of tensors travels between stages"
        )
