"""qWD under FSDP2: weights travel as 4-bit differences from a copy that every rank keeps.

1. The first all-gather of a unit is exact; every rank keeps what it brought: the copy.
2. In a forward of training each rank encodes the difference of its shard, in the dtype that is gathered, from its
   part of the copy; an all-gather brings the messages; every rank, the owner too, adds all of them to the copy and
   computes with it. What a code gets wrong is in the next difference, so the copy does not drift.
3. In backward the weights are those of the forward: the copy is at hand, and nothing is sent.
4. A module in eval mode gathers exact weights and leaves the copy alone: validation changes nothing in training.

Weights that change otherwise than by small steps: `refresh` makes the next gather exact (checkpoints do). Where nobody
said so, the differences show it: when they are more than half as large as the weights, in the root mean square of the
largest value of each block, the next gather is exact and a warning says why. Every rank sees the messages of all
ranks, so every rank decides alike; the decision is read a gather later, when it has arrived and no host waits for it.

Memory: one copy of all weights of the model on each rank, in the dtype that is gathered.

Source: SDP4Bit, arXiv 2410.15526, section 4.1. There weights are gathered once a step; FSDP2 gathers them in each
forward, which sends 4 bits, and in each backward, which sends nothing here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather

from lightning_taco import _compat
from lightning_taco.codec import VALUE_DTYPES, MessageLayout, decode, encode
from lightning_taco.codec.elements import CODE_MAX
from lightning_taco.config import CodecConfig
from lightning_taco.data_parallel.deferred import DeferredFlag
from lightning_taco.data_parallel.fsdp_units import Columns, FsdpUnit
from lightning_taco.data_parallel.seeds import derived_seed, site_seed
from lightning_taco.data_parallel.settings import DataParallelConfig
from lightning_taco.data_parallel.traffic import WEIGHTS, DataParallelTraffic

CHANGED_SHARE = 0.5
"""Differences of more than this part of the weights are no step of an optimizer."""
GATHER = 2  # part of a seed


class WeightDifferenceGather(AllGather):
    """FSDP2's all-gather of a unit's weights, as differences.

    Args:
        unit: whose weights.
        config: the settings; `weights` is given.
        traffic: counts what this rank sends.
        warn: called when weights were changed from outside.

    Attributes:
        num_calls: exchanges of differences so far; part of the seed.
    """

    def __init__(
        self, unit: FsdpUnit, config: DataParallelConfig, traffic: DataParallelTraffic, warn: Callable[[str], None]
    ) -> None:
        assert config.weights is not None
        self.num_calls = 0
        self._unit, self._codec, self._min_bytes = unit, config.weights, config.min_bytes
        self._traffic, self._warn = traffic, warn
        self._seed = site_seed(config.seed, unit.name)
        self._copy: Tensor | None = None  # [P, N]
        self._copy_amax: Tensor | None = None
        self._written: torch.cuda.Event | None = None
        self._changed = DeferredFlag()
        self._must_refresh = False
        self._was_training: bool | None = None

    @property
    def copy_bytes(self) -> int:
        """Memory of the copy; 0 before the first gather."""
        return 0 if self._copy is None else self._copy.numel() * self._copy.element_size()

    def refresh(self) -> None:
        """Make the next gather in training an exact one. All ranks call it alike."""
        self._must_refresh = True

    def before_forward(self, module: nn.Module, inputs: object) -> None:
        """Drop weights that FSDP2 still holds of a forward in the other mode: exact ones, or those of the copy.

        It keeps a root module's after a forward without a backward.
        """
        if self._was_training not in (None, module.training) and not _compat.in_backward():
            self._unit.fsdp.reshard()

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer for FSDP2 to copy this rank's shard into, and the others behind and before it."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Fill `output_tensor` ``[P N]`` with the weights of all ranks, in stream order."""
        self._was_training = self._unit.module.training
        reason = self._reason_for_stock(output_tensor)
        if reason is not None:
            return self._gather_exactly(output_tensor, input_tensor, group, reason, async_op)
        if self._written is not None:
            torch.cuda.current_stream(output_tensor.device).wait_event(self._written)
        rows = output_tensor.view(group.size(), -1)
        if _compat.in_backward():
            if not self._fits(rows):  # resharded over fewer ranks after forward: what is gathered are parts of the copy
                return self._gather_exactly(output_tensor, input_tensor, group, "backward over fewer ranks", async_op)
            rows.copy_(self._held())
            return None
        if self._is_copy_stale(rows):
            self._gather_exactly(output_tensor, input_tensor, group, "first gather, or after a change of weights")
            self._keep(rows)
        else:
            self._exchange(input_tensor, group)
            rows.copy_(self._held())
        if output_tensor.is_cuda:
            self._written = torch.cuda.Event()
            self._written.record(torch.cuda.current_stream(output_tensor.device))
        return None

    def _reason_for_stock(self, output: Tensor) -> str | None:
        if output.dtype not in VALUE_DTYPES:
            return f"dtype {str(output.dtype).removeprefix('torch.')}"
        if output.numel() * output.element_size() < self._min_bytes:
            return f"smaller than min_bytes={self._min_bytes}"
        return None if self._unit.module.training else "evaluation"

    def _fits(self, rows: Tensor) -> bool:
        return self._copy is not None and self._copy.shape == rows.shape and self._copy.dtype == rows.dtype

    def _is_copy_stale(self, rows: Tensor) -> bool:
        was_changed = self._changed.read()
        if was_changed:
            self._warn(
                f"The weights of {self._unit.name or 'the model'} changed by more than half between two steps: they "
                "were set from outside, or diverge. They are gathered exactly once; call refresh_weights() on the "
                "session when you set weights."
            )
        return was_changed or self._must_refresh or not self._fits(rows)

    def _held(self) -> Tensor:
        assert self._copy is not None
        return self._copy

    def _keep(self, rows: Tensor) -> None:
        if self._fits(rows):
            self._held().copy_(rows)
        else:
            self._copy = rows.clone()
        self._copy_amax = _rms_of_block_amax(rows, self._codec.block_size)
        self._must_refresh = False

    def _gather_exactly(
        self, output: Tensor, shard: Tensor, group: dist.ProcessGroup, reason: str, async_op: bool = False
    ) -> dist.Work | None:
        sent_bytes = (group.size() - 1) * shard.numel() * shard.element_size()
        self._traffic.record_stock(WEIGHTS, "all_gather", sent_bytes, reason)
        return _compat.all_gather_single(output, shard, group=group, async_op=async_op)

    def _exchange(self, shard: Tensor, group: dist.ProcessGroup) -> None:
        """Bring the copy nearer to the weights of all ranks."""
        self.num_calls += 1
        copy = self._held()
        difference = shard.float().sub_(copy[group.rank()]).view(1, -1)
        columns = self._unit.gathered
        if columns.num_values != shard.numel():  # an extension of FSDP2 gathers something else than the parameters
            columns = Columns((shard.numel(),), (True,))
        changes: list[Tensor] = []

        def exchange_part(part: int, rows: Tensor, out: Tensor) -> None:
            seed = derived_seed(self._seed, GATHER, self.num_calls, part, group.rank())
            messages = exchange_differences(rows, out, self._codec, group, seed=seed)
            self._traffic.record_weights(messages, group.size(), rows.shape[1], shard.element_size())
            changes.append(_mean_square_of_amax(messages, self._codec, rows.shape[1]))

        columns.in_parts(difference, copy, exchange_part)
        assert self._copy_amax is not None
        # Not "larger than", so that NaN counts as a change, from which an exact gather is the way out.
        change = torch.stack(changes).amax().sqrt()
        self._changed.set((change <= CHANGED_SHARE * self._copy_amax).logical_not() & (change != 0))


def exchange_differences(
    difference: Tensor, copy: Tensor, codec: CodecConfig, group: dist.ProcessGroup, *, seed: int
) -> Tensor:
    """Add to every rank's copy what the ranks' weights differ from it by, in few bits.

    Args:
        difference: of this rank's weights, fp32 ``[1, N]``.
        copy: of the weights of all ranks, ``[P, N]``; changed in place, alike on all ranks.
        codec: of the messages.
        group: the P ranks.
        seed: of stochastic rounding.

    Returns:
        The messages of all ranks, ``uint8 [P, bytes]``.
    """
    message = encode(difference, codec, seed=seed)
    messages = message.new_empty(group.size(), message.shape[1])
    _compat.all_gather_single(messages.view(-1), message.view(-1), group=group)
    copy.add_(decode(messages, codec, difference.shape[1], copy.dtype))
    return messages


def _mean_square_of_amax(messages: Tensor, codec: CodecConfig, num_values: int) -> Tensor:
    layout = MessageLayout.of(num_values, codec)
    start = layout.scale_offset_bytes // 4
    scales = messages.view(torch.float32)[:, start : start + layout.num_blocks]
    return (scales * CODE_MAX[codec.element]).square().mean()


def _rms_of_block_amax(rows: Tensor, block_size: int) -> Tensor:
    squares = []
    for row in rows:  # one at a time: the fp32 copy of all of them need not fit
        padded = F.pad(row.float(), (0, -row.numel() % block_size))
        squares.append(padded.view(-1, block_size).abs().amax(dim=1).square().mean())
    return torch.stack(squares).mean().sqrt()
