"""The order in which the channels of an exchange are encoded: by size, so that like meets like in a block.

A block shares one scale, so beside a large channel a small one drowns in rounding error. Which channels of a module are
large changes little from step to step: the first steps are enough to see them. While they run, exchanges
go in natural order and the squares of each channel are added up on the device; then the ranks agree on the sums and
each sorts them alike. From then on channels are brought into that order before they are encoded, and back after they
are decoded. Nothing else travels: every rank knows the order.

The way of one tensor of 4 channels, blocks of 2, sizes 9, 1, 8, 2: order (0, 2, 3, 1), blocks (9, 8) and (2, 1) instead
of (9, 1) and (8, 2), and the result is put back by the inverse, (0, 3, 1, 2).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from statistics import geometric_mean
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_taco.collectives.traffic import Direction, Kind
from lightning_taco.config import SUB_BLOCK_SIZE, CodecConfig

if TYPE_CHECKING:
    from lightning_taco.dtensor.exchange import Exchange
    from lightning_taco.dtensor.sites import Site

CALIBRATION_STEPS = 4
"""Training steps in which the sizes of channels are looked at."""


class OrderKey(NamedTuple):
    """What has an order of its own: one kind of exchange of one module in one direction, of tensors of one width."""

    site: str
    direction: Direction
    kind: Kind
    num_channels: int

    def __str__(self) -> str:
        return "/".join(map(str, self))

    @classmethod
    def parse(cls, text: str) -> OrderKey:
        """The key that was written as `text`; a module's name may hold slashes."""
        site, direction, kind, num_channels = text.rsplit("/", 3)
        return cls(site, direction, kind, int(num_channels))  # type: ignore[arg-type]


@dataclass(frozen=True)
class ChannelOrder:
    """A permutation of the last dim and its inverse, ``int64 [C]`` each.

    Cost: one copy of the tensor for each of `sort` and `restore`.
    """

    indices: Tensor
    inverse: Tensor

    @classmethod
    def of(cls, indices: Tensor) -> ChannelOrder:
        """The order in which channel ``indices[i]`` comes at place i."""
        indices = indices.to(torch.int64)
        return cls(indices, torch.argsort(indices))

    def to(self, device: torch.device) -> ChannelOrder:
        """The same order on `device`."""
        return self if self.indices.device == device else ChannelOrder(self.indices.to(device), self.inverse.to(device))

    def sort(self, tensor: Tensor) -> Tensor:
        """``[..., C]`` in natural order to ``[..., C]`` in this one."""
        return tensor.index_select(-1, self.indices)

    def restore(self, tensor: Tensor) -> Tensor:
        """``[..., C]`` in this order to ``[..., C]`` in natural order."""
        return tensor.index_select(-1, self.inverse)


class ChannelOrders:
    """The channel orders of one session: calibrated in the first steps, then in use.

    Args:
        codec_of: the codec of a module in a direction; only those with ``reshape="calibrated"`` get an order.
        group: the ranks of the tensor-parallel axis; their sums are added up, in rank order.
        replicas: the ranks that are at this rank's place in every replica of the model (the data-parallel axis);
            all take the orders of the first, so that one checkpoint fits them all. ``None`` for one replica.
        inform: called on every rank with a line for the user.

    Cost: in the first steps a reduction over each tensor, in float64 and without waiting for the device; one wait and
    one gather of 8 bytes a channel at their end; then two copies of each tensor.
    """

    def __init__(
        self,
        codec_of: Callable[[str, Direction], CodecConfig | None],
        group: dist.ProcessGroup,
        replicas: dist.ProcessGroup | None,
        inform: Callable[[str], None],
    ) -> None:
        self._codec_of = codec_of
        self._group = group
        self._replicas = replicas
        self._inform = inform
        self._num_steps = 0
        self._is_calibrated = False
        self._sums: dict[OrderKey, Tensor] = {}
        self._orders: dict[OrderKey, ChannelOrder] = {}
        self._natural: dict[OrderKey, str] = {}  # why
        self._loaded: _LoadedOrders | None = None

    @property
    def is_calibrated(self) -> bool:
        """Whether the orders are in use."""
        return self._is_calibrated

    @property
    def orders(self) -> Mapping[OrderKey, ChannelOrder]:
        """The orders in use."""
        return self._orders

    def start_step(self) -> None:
        """Begin a training step; all ranks do. The one after the calibration puts the orders to use."""
        if self._is_calibrated:
            if self._loaded is not None and self._loaded.is_step_over():
                self._drop_misfits(self._loaded)
                self._loaded = None
        elif self._num_steps < CALIBRATION_STEPS:
            self._num_steps += 1
        else:
            self._finish()

    def order_for(
        self, exchange: Exchange, site: Site, codec: CodecConfig, *, is_training: bool
    ) -> ChannelOrder | None:
        """The order for an exchange, ``None`` for the natural one; during calibration its tensor is looked at.

        Args:
            exchange: the exchange, its tensor in natural order.
            site: where it happens.
            codec: its codec, with ``reshape="calibrated"``.
            is_training: whether it belongs to a training step: validation has no say in the sizes.
        """
        key = OrderKey(site.name, site.direction, exchange.kind, exchange.tensor.shape[-1])
        reason = why_natural(exchange.tensor.dim(), key.num_channels, exchange.resharded_dims, codec)
        if reason is not None:
            if not self._is_calibrated:
                self._natural[key] = reason
            return None
        if self._is_calibrated:
            return self._order_in_use(key, exchange.tensor.device)
        if is_training and not site.is_recompute:
            squares = _channel_squares(exchange.tensor)
            self._sums[key] = self._sums[key].to(squares.device) + squares if key in self._sums else squares
        return None

    def state_dict(self) -> dict[str, Any]:
        """Everything that a resumed run needs, the same on all ranks; all ranks call it.

        Until the orders are in use it waits for the device and gathers the sums. They are saved by rank, so that a run
        with as many ranks adds up the very same numbers.
        """
        sums = {} if self._is_calibrated else self._gathered_sums()
        return {
            "num_steps": self._num_steps,
            "is_calibrated": self._is_calibrated,
            "sums": {str(key): rows for key, rows in sums.items()},
            "orders": {str(key): order.indices.to("cpu", torch.int32) for key, order in self._orders.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` has given, at any tensor-parallel size.

        Orders of exchanges that this session's codecs leave in natural order are dropped.
        """
        self._num_steps = state["num_steps"]
        self._is_calibrated = state["is_calibrated"]
        self._sums = {}
        for key, rows in self._wanted(state["sums"]):
            if rows.shape[0] == self._group.size():
                self._sums[key] = rows[self._group.rank()].clone()
            elif self._group.rank() == 0:
                self._sums[key] = _sum_in_order(rows)
        self._orders = {key: ChannelOrder.of(indices) for key, indices in self._wanted(state["orders"])}
        self._loaded = _LoadedOrders(set(self._orders)) if self._orders else None

    def _order_in_use(self, key: OrderKey, device: torch.device) -> ChannelOrder | None:
        if self._loaded is not None:
            self._loaded.meet(key)
        order = self._orders.get(key)
        if order is not None and order.indices.device != device:
            order = self._orders[key] = order.to(device)
        return order

    def _wanted(self, saved: Mapping[str, Tensor]) -> Iterable[tuple[OrderKey, Tensor]]:
        """The entries whose codec asks for an order that fits its blocks; says how many of those that ask do not."""
        misfits: list[OrderKey] = []
        for text, tensor in saved.items():
            key = OrderKey.parse(text)
            codec = self._codec_of(key.site, key.direction)
            if codec is None or codec.reshape == "natural":
                continue
            if tensor.shape[-1] != key.num_channels or why_natural(2, key.num_channels, (), codec) is not None:
                misfits.append(key)
            else:
                yield key, tensor
        self._say_dropped(misfits, "do not fit the block size")

    def _drop_misfits(self, loaded: _LoadedOrders) -> None:
        misfits = loaded.misfits()
        for key in misfits:
            del self._orders[key]
        self._say_dropped(misfits, "have another number of channels than this model exchanges")

    def _say_dropped(self, keys: list[OrderKey], why: str) -> None:
        if keys:
            self._inform(
                f"lightning_taco: {len(keys)} channel order(s) of the checkpoint {why} and are dropped, such as "
                f"{keys[0].num_channels} channels of {_place(keys[0])}; the natural order is used there"
            )

    def _finish(self) -> None:
        """Put the orders to use, the same on all ranks."""
        totals = {key: _sum_in_order(rows) for key, rows in self._gathered_sums().items()}
        for key, total in totals.items():
            if torch.isfinite(total).all():
                self._orders[key] = ChannelOrder.of(order_by_size(total))
            else:
                self._natural[key] = "values were NaN or Inf"
        self._is_calibrated = True
        self._inform(self._summary(totals))
        self._sums.clear()
        self._natural.clear()

    def _gathered_sums(self) -> dict[OrderKey, Tensor]:
        """``[P, C]`` for each key, row p from rank p of the first replica; zeros where that rank had no such exchange.

        Rows, not their sum: a library's all-reduce promises no order of additions, and ranks must sort the same bits.
        """
        own = {key: sums.cpu() for key, sums in self._sums.items()}
        by_rank: list[Any] = [None] * self._group.size()
        dist.all_gather_object(by_rank, own, group=self._group)
        if self._replicas is not None:
            box = [by_rank]
            dist.broadcast_object_list(box, src=dist.get_global_rank(self._replicas, 0), group=self._replicas)
            by_rank = box[0]
        keys = sorted({key for sums in by_rank for key in sums})
        return {key: torch.stack([_row(sums, key) for sums in by_rank]) for key in keys}

    def _summary(self, totals: Mapping[OrderKey, Tensor]) -> str:
        text = f"lightning_taco: channels are sorted by size from now on at {len(self._orders)} site(s)"
        if self._orders:
            before = geometric_mean(self._spread(key, totals[key]) for key in self._orders)
            after = geometric_mean(self._spread(key, totals[key][order.indices]) for key, order in self._orders.items())
            text += (
                f", where a channel was {before:.2f}x smaller than the RMS of its block and now is {after:.2f}x smaller"
                " (geometric mean)"
            )
        if self._natural:
            reasons = Counter(self._natural.values())
            text += "; natural order stays at " + ", ".join(f"{count} ({why})" for why, count in reasons.items())
        return text

    def _spread(self, key: OrderKey, squares: Tensor) -> float:
        codec = self._codec_of(key.site, key.direction)
        assert codec is not None, "an order belongs to a codec"
        return spread_within_blocks(squares, _unit(codec))


class _LoadedOrders:
    """Which orders of a checkpoint the first step after it uses: one that fits nothing is dropped then."""

    def __init__(self, keys: set[OrderKey]) -> None:
        self._unused = keys
        self._met: set[tuple[str, str, str]] = set()
        self._num_steps = 0

    def meet(self, key: OrderKey) -> None:
        self._unused.discard(key)
        self._met.add(key[:3])

    def is_step_over(self) -> bool:
        """Called at the start of each step; true from the second on."""
        self._num_steps += 1
        return self._num_steps > 1

    def misfits(self) -> list[OrderKey]:
        """Orders of exchanges that have happened, but with other numbers of channels only."""
        return sorted(key for key in self._unused if key[:3] in self._met)


def why_natural(num_dims: int, num_channels: int, resharded_dims: tuple[int, ...], codec: CodecConfig) -> str | None:
    """Why a tensor keeps the natural order whatever its values are, ``None`` if it does not. From shapes only.

    Args:
        num_dims: of the tensor.
        num_channels: size of its last dim.
        resharded_dims: the dims that the exchange cuts or joins; may count from the end.
        codec: the codec.
    """
    if any(dim % num_dims == num_dims - 1 for dim in resharded_dims):
        return "the exchange cuts or joins the last dim"
    if num_channels % codec.block_size:
        return f"{num_channels} channels are no multiple of block_size={codec.block_size}"
    if num_channels <= _unit(codec):
        return "one block holds all channels"
    return None


def order_by_size(squares: Tensor) -> Tensor:
    """``int64 [C]``: channels by their summed squares ``[C]``, largest first; ties by index."""
    return torch.argsort(squares, descending=True, stable=True)


def spread_within_blocks(squares: Tensor, size: int) -> float:
    """How many times smaller than the RMS of its block a channel is: the geometric mean over channels, 1 for all alike.

    Where a block is rotated, each of its channels gets rounding error in proportion to the block's RMS, so the relative
    error of a channel falls as this does. That of the whole tensor does not: the large channels rule it, and among
    their like they round no better, or a little worse.

    Args:
        squares: summed squares of the channels, ``float64 [C]``, finite; channels of zeros do not count.
        size: channels in a block; divides C.

    >>> round(spread_within_blocks(torch.tensor([100.0, 1.0, 100.0, 1.0]), 2), 2)
    2.25
    >>> round(spread_within_blocks(torch.tensor([100.0, 100.0, 1.0, 1.0]), 2), 2)
    1.0
    """
    blocks = squares.double().view(-1, size)
    mean = blocks.mean(1, keepdim=True).expand_as(blocks)
    live = blocks > 0
    if not live.any():
        return 1.0
    return (mean[live].log() - blocks[live].log()).mean().div(2).exp().item()


def _unit(codec: CodecConfig) -> int:
    """Values within which the order makes no difference."""
    return SUB_BLOCK_SIZE if codec.scale_mode == "fine" else codec.block_size


def _channel_squares(tensor: Tensor) -> Tensor:
    """``float64 [C]``: the sum of squares of each channel, in which neither 1e-30 nor 1e30 is lost."""
    rows = tensor.detach().reshape(-1, tensor.shape[-1])
    return torch.linalg.vector_norm(rows, dim=0, dtype=torch.float64).square()


def _sum_in_order(rows: Tensor) -> Tensor:
    """``[P, C] -> [C]``, added from the first row to the last."""
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total


def _row(sums: Mapping[OrderKey, Tensor], key: OrderKey) -> Tensor:
    return sums[key] if key in sums else torch.zeros(key.num_channels, dtype=torch.float64)


def _place(key: OrderKey) -> str:
    return f"{key.site or '(outside any module)'}, {key.direction} {key.kind}"
