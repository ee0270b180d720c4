"""Counters of what a rank sends to the other data-parallel ranks, by what it is and how far it goes."""

from __future__ import annotations

from torch import Tensor

from lightning_taco.collectives.traffic import Direction, Kind, TrafficCounters, TrafficKey

COMPRESSED = "compressed"
INSIDE_NODE = "gradients inside a node"
BETWEEN_NODES = "gradients between nodes"
WEIGHTS = "weights"
WHAT = (INSIDE_NODE, BETWEEN_NODES, WEIGHTS)


class DataParallelTraffic(TrafficCounters):
    """`TrafficCounters` whose `site` is one of `WHAT`, with the values that were sent beside their bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.num_values: dict[str, int] = {}

    def record_inside_node(self, messages: Tensor, num_ranks: int, num_values: int, item_bytes: int) -> None:
        """Count an exchange among `num_ranks` ranks, this one included, of equal messages of `num_values` values."""
        self._record_compressed(INSIDE_NODE, "reduce_scatter", messages, num_ranks, num_values, item_bytes)

    def record_between_nodes(self, messages: Tensor, num_ranks: int, num_values: int, item_bytes: int) -> None:
        """The same between nodes."""
        self._record_compressed(BETWEEN_NODES, "reduce_scatter", messages, num_ranks, num_values, item_bytes)

    def record_weights(self, messages: Tensor, num_ranks: int, num_values: int, item_bytes: int) -> None:
        """The same for weight differences."""
        self._record_compressed(WEIGHTS, "all_gather", messages, num_ranks, num_values, item_bytes)

    def record_stock(self, what: str, kind: Kind, sent_bytes: int, reason: str) -> None:
        """Count an exchange that went as it is, and why."""
        self.record(TrafficKey(what, _direction(what), kind, reason), sent_bytes, sent_bytes)

    def bits_per_value(self, what: str) -> float:
        """Bits on the wire for each value that was sent compressed; 0 when none was."""
        sent = sum(
            count.sent_bytes for key, count in self.counts.items() if key.site == what and key.outcome == COMPRESSED
        )
        return 8 * sent / self.num_values[what] if self.num_values.get(what) else 0.0

    def clear(self) -> None:
        """Start from zero."""
        super().clear()
        self.num_values.clear()

    def _record_compressed(
        self, what: str, kind: Kind, messages: Tensor, num_ranks: int, num_values: int, item_bytes: int
    ) -> None:
        others = num_ranks - 1
        sent_bytes = messages.numel() * messages.element_size() // num_ranks * others
        key = TrafficKey(what, _direction(what), kind, COMPRESSED)
        self.record(key, others * num_values * item_bytes, sent_bytes)
        self.num_values[what] = self.num_values.get(what, 0) + others * num_values


def _direction(what: str) -> Direction:
    return "forward" if what == WEIGHTS else "backward"
