"""Counters of what travels: messages and bytes, compressed and as they are, by kind, site and direction.

Bytes are those that one rank sends, by the algorithm that the exchange uses: a ring for the library's own collectives
(2 (P - 1) / P of the tensor for an all-reduce over P ranks, half of that for the others), and what our messages really
hold, scales and padding included, for the compressed ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from lightning_taco.codec import MessageLayout
from lightning_taco.config import CodecConfig

Kind = Literal["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "send"]
Direction = Literal["forward", "backward"]


class TrafficKey(NamedTuple):
    """What a counter counts: one kind of exchange of one module in one direction, and why it went as it did."""

    site: str
    direction: Direction
    kind: Kind
    outcome: str
    """``"compressed"``, or the reason why the exchange took the stock path."""


@dataclass
class TrafficCount:
    """Messages and bytes of one `TrafficKey`."""

    num_messages: int = 0
    stock_bytes: int = 0
    sent_bytes: int = 0

    def add(self, other: TrafficCount) -> None:
        """Add `other` to this."""
        self.num_messages += other.num_messages
        self.stock_bytes += other.stock_bytes
        self.sent_bytes += other.sent_bytes

    @property
    def ratio(self) -> float:
        """Bytes that would have been sent over bytes sent; 1 when nothing was."""
        return self.stock_bytes / self.sent_bytes if self.sent_bytes else 1.0


@dataclass
class TrafficCounters:
    """What one rank sent, by `TrafficKey`. Cost of `record`: one dictionary look-up."""

    counts: dict[TrafficKey, TrafficCount] = field(default_factory=dict)

    def record(self, key: TrafficKey, stock_bytes: int, sent_bytes: int) -> None:
        """Count one exchange."""
        count = self.counts.get(key)
        if count is None:
            count = self.counts[key] = TrafficCount()
        count.num_messages += 1
        count.stock_bytes += stock_bytes
        count.sent_bytes += sent_bytes

    def total(
        self, *, outcome: str | None = None, kind: str | None = None, direction: str | None = None
    ) -> TrafficCount:
        """The sum of all counters, or of those with this outcome, kind or direction."""
        return _sum(
            count
            for key, count in self.counts.items()
            if outcome in (None, key.outcome) and kind in (None, key.kind) and direction in (None, key.direction)
        )

    def stock_reasons(self) -> dict[str, int]:
        """How many exchanges took the stock path, by reason."""
        reasons: dict[str, int] = {}
        for key, count in self.counts.items():
            if key.outcome != "compressed":
                reasons[key.outcome] = reasons.get(key.outcome, 0) + count.num_messages
        return reasons

    def clear(self) -> None:
        """Start from zero."""
        self.counts.clear()


def _sum(counts: Iterable[TrafficCount]) -> TrafficCount:
    total = TrafficCount()
    for count in counts:
        total.add(count)
    return total


def stock_sent_bytes(kind: Kind, local_bytes: int, world_size: int) -> int:
    """Bytes that a rank sends in the library's own exchange of a tensor of `local_bytes` on each rank."""
    if kind == "all_gather":
        return (world_size - 1) * local_bytes
    factor = 2 if kind == "all_reduce" else 1
    return factor * (world_size - 1) * local_bytes // world_size


def compressed_sent_bytes(
    kind: Kind, num_values: int, world_size: int, codec: CodecConfig, *, one_shot: bool = False
) -> int:
    """Bytes that a rank sends in our exchange of a tensor of `num_values` on each rank (even shards).

    With two ranks an all-reduce is a one-shot always, with more if `one_shot`.
    """
    others = world_size - 1
    if kind == "all_gather" or (kind == "all_reduce" and (one_shot or world_size == 2)):
        return others * MessageLayout.of(num_values, codec).message_bytes
    if kind == "all_reduce":
        return 2 * others * MessageLayout.of(chunk_values(num_values, world_size, codec), codec).message_bytes
    return others * MessageLayout.of(-(-num_values // world_size), codec).message_bytes


def chunk_values(num_values: int, world_size: int, codec: CodecConfig) -> int:
    """Values in the chunk of a two-shot all-reduce that one rank sums: whole blocks, the same on every rank."""
    num_blocks = -(-num_values // codec.block_size)
    return -(-num_blocks // world_size) * codec.block_size
