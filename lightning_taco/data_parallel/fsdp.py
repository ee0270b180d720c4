"""TLq-HS under FSDP2: what `set_custom_reduce_scatter` and `set_all_reduce_hook` take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

from lightning_taco import _compat
from lightning_taco.codec import VALUE_DTYPES
from lightning_taco.data_parallel.exchange import GradientExchange
from lightning_taco.data_parallel.fsdp_units import Columns, FsdpUnit
from lightning_taco.data_parallel.seeds import derived_seed, site_seed
from lightning_taco.data_parallel.settings import DataParallelConfig
from lightning_taco.data_parallel.traffic import INSIDE_NODE

SHARDS, REPLICAS = range(2)  # part of a seed


class CompressedReduceScatter(ReduceScatter):
    """FSDP2's reduce-scatter of a unit's gradients, compressed.

    FSDP2 says with `op` what is to be divided here, and divides the rest itself, so the mean is taken once. For fp16 it
    would add first and divide afterwards, which overflows from gradients of 65504 divided by the root of the ranks on:
    there it is told not to divide, and the whole division is done here, in fp32.

    Args:
        unit: whose gradients.
        exchange: over the ranks of the unit.
        config: the settings.

    Attributes:
        num_calls: exchanges so far; part of the seed.
    """

    def __init__(self, unit: FsdpUnit, exchange: GradientExchange, config: DataParallelConfig) -> None:
        self.num_calls = 0
        self._columns, self._exchange, self._min_bytes = unit.reduced, exchange, config.min_bytes
        self._seed = site_seed(config.seed, unit.name)
        self._own_factor = 1.0
        (self._group,) = _compat.fsdp_param_groups(unit.module)
        self._divides = unit.reduces_in_half
        if self._divides:
            self._own_factor = 1.0 / (self._group.gradient_divide_factor or unit.num_ranks)
            unit.fsdp.set_gradient_divide_factor(1.0)

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer for FSDP2 to copy gradients into."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce `input_tensor` ``[P N]`` into `output_tensor` ``[N]``, in stream order.

        Raises:
            RuntimeError: for fp16, when the divide factor was set after compression was.
        """
        if self._divides and self._group.gradient_divide_factor != 1.0:
            raise RuntimeError(
                f"set_gradient_divide_factor({self._group.gradient_divide_factor}) was called after fp16 gradients "
                "were set to be compressed, so they would be divided twice; call it before."
            )
        self.num_calls += 1
        columns, reason = self._columns, None
        factor = _compat.reduction_factor(op, group.size())
        if factor is None:
            reason = f"reduction {op}"
        elif columns.is_mixed and columns.num_values != output_tensor.numel():
            reason = "parameters without gradients beside tensor-parallel ones"
        elif input_tensor.dtype not in VALUE_DTYPES:
            reason = f"dtype {str(input_tensor.dtype).removeprefix('torch.')}"
        if reason is not None:
            return self._stock(output_tensor, input_tensor, group, op, reason, async_op)
        assert factor is not None
        whole_factor = factor * self._own_factor

        def reduce_part(part: int, rows: Tensor, out: Tensor) -> None:
            if rows.numel() * rows.element_size() < self._min_bytes:
                reason = f"smaller than min_bytes={self._min_bytes}"
                self._stock(out, rows.reshape(-1), group, op, reason)
                return
            seed = derived_seed(self._seed, SHARDS, self.num_calls, part)
            self._exchange.reduce_scatter(rows, out, factor=whole_factor, seed=seed)

        columns.in_parts(input_tensor.view(group.size(), -1), output_tensor, reduce_part)
        return None

    def _stock(
        self, out: Tensor, values: Tensor, group: dist.ProcessGroup, op: Any, reason: str, async_op: bool = False
    ) -> dist.Work | None:
        sent_bytes = (group.size() - 1) * out.numel() * out.element_size()
        self._exchange.traffic.record_stock(INSIDE_NODE, "reduce_scatter", sent_bytes, reason)
        if self._divides:
            values.mul_(self._own_factor)  # FSDP2's buffer, which it divides in place, too
        return _compat.reduce_scatter_single(out, values, group=group, op=op, async_op=async_op)


class CompressedReplicaSum:
    """The sum, times a factor, of a unit's reduced gradients over replicas: the second half of HSDP.

    FSDP2's ``set_all_reduce_hook`` takes it where FSDP2 shards over the ranks of one replica and knows of no other, and
    `hsdp.ReplicaGroup` where FSDP2 knows the replicas.

    Args:
        unit: whose gradients.
        exchange: over the replicas.
        config: the settings.

    Attributes:
        num_calls: exchanges so far; part of the seed.
    """

    def __init__(self, unit: FsdpUnit, exchange: GradientExchange, config: DataParallelConfig) -> None:
        self.num_calls = 0
        self._columns, self._exchange, self._min_bytes = unit.reduced, exchange, config.min_bytes
        self._seed = site_seed(config.seed, unit.name)

    def __call__(self, reduce_output: Tensor) -> None:
        """Average `reduce_output` ``[N]`` in place, in stream order."""
        exchange = self._exchange
        factor = 1.0 / exchange.groups.world_size
        self.reduce(reduce_output, factor, lambda values, reason: average_as_it_is(values, exchange, reason))

    def reduce(self, values: Tensor, factor: float, as_it_is: Callable[[Tensor, str], None]) -> None:
        """Put the sum of `values` ``[N]`` over the replicas times `factor` in their place, in stream order.

        Args:
            values: this replica's.
            factor: 1 for a sum.
            as_it_is: does the same to a part of the values without compression, and is told why.
        """
        self.num_calls += 1
        columns = self._columns
        if columns.num_values != values.numel():
            # Some parameters got no gradient: which, we are not told.
            if columns.is_mixed:
                as_it_is(values, "parameters without gradients beside tensor-parallel ones")
                return
            columns = Columns((values.numel(),), (True,))

        def reduce_part(part: int, rows: Tensor, out: Tensor) -> None:
            reason = self._reason_for_stock(rows)
            if reason is not None:
                as_it_is(out, reason)
                return
            seed = derived_seed(self._seed, REPLICAS, self.num_calls, part)
            self._exchange.all_reduce(rows.view(-1), out, factor=factor, seed=seed)

        columns.in_parts(values.view(1, -1), values, reduce_part)

    def _reason_for_stock(self, rows: Tensor) -> str | None:
        if rows.dtype not in VALUE_DTYPES:
            return f"dtype {str(rows.dtype).removeprefix('torch.')}"
        is_small = rows.numel() * rows.element_size() < self._min_bytes
        return f"smaller than min_bytes={self._min_bytes}" if is_small else None


def average_as_it_is(values: Tensor, exchange: GradientExchange, reason: str) -> None:
    """The library's own mean of `values` over the ranks of `exchange`, in place; counted with the reason."""
    record_all_reduce_as_it_is(values, exchange, reason)
    # First: the sum of large fp16 gradients need not fit, their mean does.
    values.mul_(1.0 / exchange.groups.world_size)
    dist.all_reduce(values, group=exchange.groups.whole)


def record_all_reduce_as_it_is(values: Tensor, exchange: GradientExchange, reason: str) -> None:
    """Count an all-reduce of `values` over the ranks of `exchange` that is not compressed."""
    num_ranks = exchange.groups.world_size
    sent_bytes = 2 * (num_ranks - 1) * values.numel() * values.element_size() // num_ranks
    exchange.traffic.record_stock(INSIDE_NODE, "all_reduce", sent_bytes, reason)
