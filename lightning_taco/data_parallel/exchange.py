"""TLq-HS: the reduce-scatter and all-reduce of gradients in two levels, 8 bits inside a node and 4 bits between nodes.

The algorithm, for P = M nodes x L ranks, rank = node * L + place, values cut in up to 3 slices:

1. Each rank encodes one message for each rank, rotated, with the codec inside a node.
2. All-to-all inside the node: to place l go the M messages for the ranks at place l of every node.
3. Each rank adds the L messages for each of its M destinations in fp32 and in order, still rotated, and quantises the
   sums with the codec between nodes: one launch.
4. All-to-all between the nodes, among the ranks at one place.
5. Each rank adds the M messages in fp32 and in order, multiplies by the factor (1 / P for a mean), and rotates back.

Steps 2 and 4 of different slices, which use different links, are under way at the same time. The factor is applied
once, in fp32, at the very end. With one node or one rank a node, or one codec only, steps 3 and 4 fall away.

Source: SDP4Bit, arXiv 2410.15526, section 4.2. There the division comes first, and the rotation is of order 32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from lightning_taco.codec import decode, decode_sum, encode, recode_sum
from lightning_taco.collectives.transport import Pending, ProcessGroupTransport
from lightning_taco.config import CodecConfig
from lightning_taco.data_parallel.nodes import NodeGroups
from lightning_taco.data_parallel.seeds import derived_seed
from lightning_taco.data_parallel.slices import advance_staggered, column_slices
from lightning_taco.data_parallel.traffic import DataParallelTraffic

INSIDE, BETWEEN, SUM = range(3)  # where values are rounded: part of a seed


@dataclass(frozen=True)
class GradientExchange:
    """Sums of gradients over the ranks of `groups`.

    Args:
        groups: the ranks, and their nodes.
        inside: codec between ranks of one node; ``None`` for the other one at all levels.
        between: codec between nodes; ``None`` for the other one at all levels.
        traffic: counts what this rank sends.
        num_slices: in how many pieces, unless a call says it; ``None``: by the size, 1 to 3.
    """

    groups: NodeGroups
    inside: CodecConfig | None
    between: CodecConfig | None
    traffic: DataParallelTraffic
    num_slices: int | None = None

    @property
    def has_two_levels(self) -> bool:
        """Whether messages are quantised anew between a node and the others."""
        return self.groups.has_two_levels and self.inside is not None and self.between is not None

    @property
    def first_codec(self) -> CodecConfig:
        """The codec of the first step: inside a node, or of the only level."""
        inside_first = self.has_two_levels or self.groups.num_nodes == 1
        codec = (self.inside or self.between) if inside_first else (self.between or self.inside)
        assert codec is not None, "an exchange needs a codec"
        return codec

    @property
    def last_codec(self) -> CodecConfig:
        """The codec of the last step: between nodes, or of the only level."""
        return self.between if self.has_two_levels and self.between is not None else self.first_codec

    def reduce_scatter(
        self, rows: Tensor, out: Tensor, *, factor: float = 1.0, seed: int = 0, num_slices: int | None = None
    ) -> Tensor:
        """This rank's row of the sum of `rows` over the ranks, times `factor`.

        Args:
            rows: bf16, fp16 or fp32, ``[P, N]``, row p for rank p.
            out: ``[N]``, contiguous, of any of these dtypes; it may not overlap `rows`.
            factor: 1 for a sum, 1 / P for a mean; applied in fp32.
            seed: of stochastic rounding, the same on all ranks; each rank draws its own numbers of it.
            num_slices: in how many pieces; left out, as the exchange was made.

        Returns:
            `out`.

        Cost: with two levels each rank sends (L - 1) / L P N values in the codec inside and (M - 1) N in the one
            between; 3 launches a slice and a copy of the message; one quantisation a level.
        """
        codec = self.first_codec
        pieces = [
            self._reduce_scatter_piece(rows[:, start:stop], out[start:stop], factor, derived_seed(seed, start))
            for start, stop in column_slices(rows, codec.block_size, num_slices or self.num_slices)
        ]
        advance_staggered(pieces)
        return out

    def all_reduce(
        self, values: Tensor, out: Tensor, *, factor: float = 1.0, seed: int = 0, num_slices: int | None = None
    ) -> Tensor:
        """The sum of `values` over the ranks, times `factor`, with the same bits on every rank.

        The reduce-scatter, then an all-gather (between nodes, then inside) of the sums, which are quantised once more:
        with the first codec (8 bits), since their error is not averaged over ranks any more.

        Args:
            values: bf16, fp16 or fp32, ``[N]``.
            out: ``[N]``, contiguous; it may be `values`.
            factor: as for `reduce_scatter`.
            seed: as for `reduce_scatter`.
            num_slices: as for `reduce_scatter`.

        Returns:
            `out`.
        """
        num_ranks, num_values = self.groups.world_size, values.numel()
        block_size = self.first_codec.block_size
        chunk = -(-num_values // (num_ranks * block_size)) * block_size
        rows = values.new_zeros(num_ranks * chunk)
        rows[:num_values] = values
        rows = rows.view(num_ranks, chunk)
        # The rows are a copy, so they take the result too.
        pieces = [
            self._all_reduce_piece(rows[:, start:stop], factor, derived_seed(seed, start))
            for start, stop in column_slices(rows, block_size, num_slices or self.num_slices)
        ]
        advance_staggered(pieces)
        return out.copy_(rows.view(-1)[:num_values])

    def _reduce_scatter_piece(self, rows: Tensor, out: Tensor, factor: float, seed: int) -> Iterator[None]:
        messages: Tensor | None = None
        for messages in self._sums_to_add(rows, seed):
            if messages is None:
                yield
        assert messages is not None
        decode_sum(messages, self.last_codec, rows.shape[1], out.dtype, factor=factor, out=out)

    def _all_reduce_piece(self, rows: Tensor, factor: float, seed: int) -> Iterator[None]:
        num_values = rows.shape[1]
        messages: Tensor | None = None
        for messages in self._sums_to_add(rows, seed):
            if messages is None:
                yield
        assert messages is not None
        seed = derived_seed(seed, SUM, self.groups.whole.rank())
        own = recode_sum(messages.unsqueeze(1), self.last_codec, self.first_codec, num_values, factor=factor, seed=seed)
        if self.has_two_levels:
            assert self.groups.between is not None
            assert self.groups.inside is not None
            gathered, work = _start_all_gather(own, self.groups.between)
            self.traffic.record_between_nodes(gathered, self.groups.num_nodes, num_values, rows.element_size())
            yield
            work.wait()
            sums, work = _start_all_gather(gathered.view(1, -1), self.groups.inside)
            yield
            work.wait()
            values_inside = num_values * self.groups.num_nodes
            self.traffic.record_inside_node(sums, self.groups.node_size, values_inside, rows.element_size())
            # [place, node, message] to rank order
            sums = sums.view(self.groups.node_size, self.groups.num_nodes, -1).transpose(0, 1).contiguous()
        else:
            sums, work = _start_all_gather(own, self.groups.whole)
            self._record_only_level(sums, num_values, rows.element_size())
            yield
            work.wait()
        decode(sums.view(self.groups.world_size, -1), self.first_codec, num_values, rows.dtype, out=rows)

    def _sums_to_add(self, rows: Tensor, seed: int) -> Iterator[Tensor | None]:
        """Yields ``None`` while an exchange is under way, at last the messages ``[S, bytes]`` whose sum is wanted."""
        groups, num_values = self.groups, rows.shape[1]
        own_seed = derived_seed(seed, INSIDE, groups.whole.rank())
        messages = encode(rows, self.first_codec, seed=own_seed)
        if not self.has_two_levels:
            received, work = _start_all_to_all(messages, groups.whole)
            self._record_only_level(received, num_values, rows.element_size())
            yield None
            work.wait()
            yield received
            return
        assert groups.inside is not None
        assert groups.between is not None
        size, num_nodes, item = groups.node_size, groups.num_nodes, rows.element_size()
        by_place = messages.view(num_nodes, size, -1).transpose(0, 1).contiguous()
        received, work = _start_all_to_all(by_place.view(size, -1), groups.inside)
        self.traffic.record_inside_node(received, size, num_values * num_nodes, item)
        yield None
        work.wait()
        own_seed = derived_seed(seed, BETWEEN, groups.whole.rank())
        sources = received.view(size, num_nodes, -1)
        sums = recode_sum(sources, self.first_codec, self.last_codec, num_values, seed=own_seed)
        received, work = _start_all_to_all(sums, groups.between)
        self.traffic.record_between_nodes(received, num_nodes, num_values, item)
        yield None
        work.wait()
        yield received

    def _record_only_level(self, messages: Tensor, num_values: int, item_bytes: int) -> None:
        record = self.traffic.record_inside_node if self.groups.num_nodes == 1 else self.traffic.record_between_nodes
        record(messages, self.groups.world_size, num_values, item_bytes)


class _Sent:
    """An exchange under way, and the buffers that it reads."""

    def __init__(self, arriving: Pending, *buffers: Tensor) -> None:
        self._arriving, self._buffers = arriving, buffers

    def wait(self) -> None:
        """On CUDA the stream waits, on CPU the process."""
        self._arriving.wait()
        self._buffers = ()


def _start_all_to_all(messages: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, _Sent]:
    """Two ranks swap their rows by an all-gather, which NCCL does faster for each byte."""
    arriving = ProcessGroupTransport(group, pairs_gather=True).start_all_to_all(messages, True)
    return arriving.messages, _Sent(arriving, messages)


def _start_all_gather(message: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, _Sent]:
    """``[1, bytes]`` of each rank -> ``[ranks, bytes]``."""
    arriving = ProcessGroupTransport(group).start_all_gather(message.reshape(1, -1), True)
    return arriving.messages, _Sent(arriving, message)
