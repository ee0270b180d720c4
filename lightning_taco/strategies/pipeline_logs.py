"""What a step logs on the rank of the last stage, for each micro-batch, logged once and on all ranks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torchmetrics import Metric

from lightning_taco.pipeline_parallel.microbatches import mean

GROUP_ARGUMENT = "sync_dist_group"
_SIGNATURE = inspect.signature(pl.LightningModule.log)

Call = dict[str, Any]
"""Arguments of one ``self.log``."""


class StepLogs:
    """``self.log`` of one module while its step runs through a pipeline.

    Args:
        module: whose ``log`` is put aside and used for what is logged in the end.
        mesh: whose axes stand for the process groups that a call may name.
    """

    def __init__(self, module: pl.LightningModule, mesh: DeviceMesh) -> None:
        self._module, self._mesh = module, mesh
        self._calls: list[list[Call]] = []
        self._open: list[Call] = []

    @contextmanager
    def captured(self) -> Iterator[None]:
        """Keep what is logged within; `merged` gives it, `replay` logs it."""
        before = self._module.__dict__.get("log")
        self._module.__dict__["log"] = self._keep
        self._calls.clear()
        try:
            yield
        finally:
            if before is None:
                del self._module.__dict__["log"]
            else:
                self._module.__dict__["log"] = before

    def run(self, step: Callable[[], Any]) -> Any:
        """Run a step; what it logs counts only if it ends."""
        self._open = []
        result = step()
        self._calls.append(self._open)
        return result

    def merged(self) -> list[Call]:
        """One call for each name: values of micro-batches put together by ``reduce_fx``, batch sizes added up.

        Raises:
            ValueError: for names that were not logged for each micro-batch.
        """
        by_name: dict[str, list[Call]] = {}
        for calls in self._calls:
            for call in calls:
                by_name.setdefault(call["name"], []).append(call)
        return [self._merged_call(name, calls) for name, calls in by_name.items()]

    def replay(self, calls: list[Call]) -> None:
        """Log `calls`, on every rank."""
        for call in calls:
            axis = call.get(GROUP_ARGUMENT)
            group = {} if axis is None else {GROUP_ARGUMENT: self._mesh[axis].get_group()}
            self._module.log(**{**call, **group})

    def _keep(self, *args: Any, **kwargs: Any) -> None:
        call = dict(_SIGNATURE.bind(self._module, *args, **kwargs).arguments)
        call.pop("self")
        value = call["value"]
        if isinstance(value, Metric):
            raise TypeError(
                f"self.log({call['name']!r}, ...) was given a {type(value).__name__} of torchmetrics. Under a pipeline "
                "only the ranks of the last stage see outputs and update it; log a number, such as its forward(...)."
            )
        if isinstance(value, DTensor):
            value = value.full_tensor()
        call["value"] = value.detach() if isinstance(value, Tensor) else value
        if call.get(GROUP_ARGUMENT) is not None:
            call[GROUP_ARGUMENT] = self._axis_of(call[GROUP_ARGUMENT])
        self._open.append(call)

    def _axis_of(self, group: Any) -> str:
        for axis in self._mesh.mesh_dim_names or ():
            ranks = dist.get_process_group_ranks(self._mesh[axis].get_group())
            if isinstance(group, dist.ProcessGroup) and dist.get_process_group_ranks(group) == ranks:
                return axis
        raise ValueError(
            f"self.log(..., {GROUP_ARGUMENT}=...) names a group that is no axis of the mesh, so ranks of other stages "
            "do not know theirs; use self.device_mesh['data_parallel'].get_group()."
        )

    def _merged_call(self, name: str, calls: list[Call]) -> Call:
        if len(calls) != len(self._calls):
            raise ValueError(
                f"self.log({name!r}, ...) was called {len(calls)} times for {len(self._calls)} micro-batches; log the "
                "same names once for each."
            )
        merged = {**calls[0], "value": _together([call["value"] for call in calls], calls[0].get("reduce_fx", "mean"))}
        if calls[0].get("batch_size") is not None:
            merged["batch_size"] = sum(call["batch_size"] for call in calls)
        return merged


def _together(values: list[Any], reduce_fx: str | Callable[..., Any]) -> Any:
    name = reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "")
    if name in ("max", "min", "sum"):
        return getattr(torch.stack([torch.as_tensor(value) for value in values]), name)()
    if isinstance(values[0], Tensor):
        return mean([value.reshape(()) for value in values])
    return sum(values) / len(values)
