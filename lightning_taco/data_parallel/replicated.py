"""Averages, compressed, gradients of parameters that every data-parallel rank holds whole, without a wrapper.

As DistributedDataParallel does: gradients are laid together in buckets, and a bucket is averaged as soon as backward
has its last gradient, on a stream of its own. Unlike there, parameters may be DTensors of tensor parallelism, and
gradients may be quantised (`quan_grad`): then buckets are averaged when backward has ended.

Buckets start in the same order on all ranks. Which parameters got a gradient anywhere is agreed after them; a rank
waits for that only where a gradient is missing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from lightning_taco.data_parallel.ddp import average_bucket
from lightning_taco.data_parallel.exchange import GradientExchange
from lightning_taco.data_parallel.quan_grad import part_of_gradient
from lightning_taco.data_parallel.quantized_gradient import like_parameter, local_part, quantized_gradient
from lightning_taco.data_parallel.seeds import derived_seed
from lightning_taco.data_parallel.settings import DataParallelConfig
from lightning_taco.data_parallel.side_stream import SideStream

BUCKET_BYTES = 25 << 20
AVERAGED = 5  # part of a seed


class ReplicatedGradients:
    """The gradients of `parameters`, averaged over the ranks of `exchange` in each backward that is to be synchronised.

    Args:
        parameters: the same on all ranks, in the same order.
        exchange: over the data-parallel ranks.
        config: the settings.

    Attributes:
        num_calls: backwards that were synchronised; part of the seed.
    """

    def __init__(self, parameters: Iterable[Tensor], exchange: GradientExchange, config: DataParallelConfig) -> None:
        self.num_calls = 0
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._exchange, self._config = exchange, config
        self._is_synchronizing = True
        self._buckets = make_buckets(self._parameters)
        self._waits_for: list[set[Tensor]] = []
        self._missing: list[tuple[Tensor, Tensor]] = []
        self._has_gradient: dict[Tensor, bool] = {}
        self._num_started = 0
        self._side = SideStream()
        self._place_of = {parameter: place for place, parameter in enumerate(self._parameters)}
        self._bucket_of = {parameter: index for index, bucket in enumerate(self._buckets) for parameter in bucket}
        self._handles: list[RemovableHandle] = [
            parameter.register_post_accumulate_grad_hook(self._on_gradient)
            for parameter in self._parameters
            if quantized_gradient(parameter) is None
        ]
        self._start_over()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Only accumulate in the backwards within."""
        before, self._is_synchronizing = self._is_synchronizing, False
        try:
            yield
        finally:
            self._is_synchronizing = before

    def finish(self) -> None:
        """Average what is left, once backward has ended; the gradients are ready afterwards. All ranks call it."""
        if not self._is_synchronizing:
            return
        while self._num_started < len(self._buckets):
            self._start_bucket()
        self._agree_on_missing()
        if self._side.stream is not None:
            torch.cuda.current_stream(self._side.stream.device).wait_stream(self._side.stream)
        self._start_over()

    def detach(self) -> None:
        """Remove every hook."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _start_over(self) -> None:
        self._waits_for = [{p for p in bucket if quantized_gradient(p) is None} for bucket in self._buckets]
        self._missing = []
        self._num_started = 0
        self._has_gradient = dict.fromkeys(self._parameters, False)

    def _on_gradient(self, parameter: Tensor) -> None:
        if not self._is_synchronizing:
            return
        index = self._bucket_of[parameter]
        if index < self._num_started:
            raise RuntimeError(
                f"A gradient of a parameter of shape {tuple(parameter.shape)} came after it had been averaged: it "
                "comes in parts (reentrant activation checkpointing: use use_reentrant=False), or backward was not "
                "called through the strategy (use fabric.backward, or self.manual_backward)."
            )
        self._waits_for[index].discard(parameter)
        while self._num_started < len(self._buckets) and self._is_ready(self._num_started):
            self._start_bucket()

    def _is_ready(self, index: int) -> bool:
        is_quantized = any(quantized_gradient(parameter) is not None for parameter in self._buckets[index])
        return not is_quantized and not self._waits_for[index]

    def _start_bucket(self) -> None:
        bucket = self._buckets[self._num_started]
        self._num_started += 1
        if self._num_started == 1:
            self.num_calls += 1
        with self._side.beside_backward(local_part(bucket[0]).device):
            flat = torch.cat([self._part(parameter).reshape(-1) for parameter in bucket])
            call = self.num_calls * len(self._buckets) + self._num_started
            average_bucket(flat, self._exchange, self._config, call)
            for parameter, values in zip(bucket, flat.split([local_part(p).numel() for p in bucket]), strict=True):
                self._give_back(parameter, values)

    def _part(self, parameter: Tensor) -> Tensor:
        gradient = quantized_gradient(parameter)
        if gradient is not None:
            self._has_gradient[parameter] = gradient.num_added > 0
            return gradient.read()
        self._has_gradient[parameter] = parameter.grad is not None
        return torch.zeros_like(local_part(parameter)) if parameter.grad is None else _local_gradient(parameter)

    def _give_back(self, parameter: Tensor, values: Tensor) -> None:
        if not self._has_gradient[parameter]:
            self._missing.append((parameter, values))
        elif (gradient := quantized_gradient(parameter)) is not None:
            gradient.replace(values, seed=self._seed_after(parameter))
        else:
            part = _local_gradient(parameter)
            part.copy_(values.view(part.shape))

    def _agree_on_missing(self) -> None:
        """Give the others' mean to parameters without a gradient here; those without one anywhere stay without."""
        device = local_part(self._parameters[0]).device
        with self._side.beside_backward(device):
            flags = [self._has_gradient[parameter] for parameter in self._parameters]
            anywhere = torch.tensor(flags, dtype=torch.int32).to(device, non_blocking=True)
            dist.all_reduce(anywhere, op=dist.ReduceOp.MAX, group=self._exchange.groups.whole)
        if not self._missing:
            return
        if self._side.stream is not None:
            self._side.stream.synchronize()
        has_gradient = dict(zip(self._parameters, anywhere.tolist(), strict=True))
        for parameter, values in self._missing:
            if not has_gradient[parameter]:
                continue
            if (gradient := quantized_gradient(parameter)) is not None:
                gradient.replace(values, seed=self._seed_after(parameter))
            else:
                part = values.clone().view(local_part(parameter).shape)
                parameter.grad = like_parameter(parameter, part)

    def _seed_after(self, parameter: Tensor) -> int:
        """The same on all ranks, which hold the same mean and are to hold the same bits of it."""
        return derived_seed(self._config.seed, AVERAGED, self.num_calls, self._place_of[parameter])


def make_buckets(parameters: list[Tensor]) -> list[list[Tensor]]:
    """Parameters of one dtype and device, last ones first, in buckets of about 25 MiB.

    Those that tensor-parallel ranks split have buckets of their own, see `fsdp_units.Columns`.
    """
    buckets: dict[tuple[Any, ...], list[list[Tensor]]] = {}
    order: list[list[Tensor]] = []
    for parameter in reversed(parameters):
        key = (parameter.dtype, local_part(parameter).device, _is_split(parameter))
        open_buckets = buckets.setdefault(key, [])
        if not open_buckets or _num_bytes(open_buckets[-1]) + _num_bytes([parameter]) > BUCKET_BYTES:
            open_buckets.append([])
            order.append(open_buckets[-1])
        open_buckets[-1].append(parameter)
    return order


@torch.no_grad()
def broadcast_from_first(tensors: Iterable[Tensor], group: dist.ProcessGroup) -> None:
    """Give every rank of `group` the values of its first rank, exactly. Cost: one broadcast a tensor."""
    source = dist.get_process_group_ranks(group)[0]
    for tensor in tensors:
        part = local_part(tensor.detach())
        contiguous = part.contiguous()
        dist.broadcast(contiguous, source, group=group)
        if contiguous is not part:
            part.copy_(contiguous)


def _local_gradient(parameter: Tensor) -> Tensor:
    """This rank's part of the gradient; a term of a sum stays one, as the mean of terms is the term of the mean."""
    gradient = parameter.grad
    assert gradient is not None
    if isinstance(gradient, DTensor) and not any(placement.is_partial() for placement in gradient.placements):
        part = part_of_gradient(parameter)
        parameter.grad = like_parameter(parameter, part)
        return part
    return local_part(gradient)


def _num_bytes(parameters: list[Tensor]) -> int:
    return sum(local_part(parameter).numel() * parameter.element_size() for parameter in parameters)


def _is_split(parameter: Tensor) -> bool:
    if not isinstance(parameter, DTensor):
        return False
    mesh = parameter.device_mesh
    return any(not p.is_replicate() and mesh.size(axis) > 1 for axis, p in enumerate(parameter.placements))
