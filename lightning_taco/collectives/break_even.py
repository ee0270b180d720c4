"""From which size on compressing pays, and by which algorithm: a pure function of timings that all ranks share.

An exchange is compressed from its break-even size on: the smallest that was measured from which on every measured size
gained `PAYS`. Below it nothing is, even close to it: times do not lie on a line between two sizes (between 4 and 16 MiB
over shared memory, where the line said 1.05x, 0.80x was measured). Above the largest size, what held for it holds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from lightning_taco.collectives.algorithms import KINDS, Algorithm, MeasuredKind
from lightning_taco.config import DEFAULT_MIN_BYTES, CodecConfig

NEVER_SLOWER = 0.98
"""What is promised of any size: at least this share of the speed of the library's own exchange."""
PAYS = 1.1
"""Speed-up that a measured size must reach: where the host is timed, two measurements of one differ by less."""
STICKINESS = 1.03
"""How many times faster another algorithm must be to replace the one of the next smaller size."""


@dataclass(frozen=True)
class Timing:
    """One kind of exchange, codec and size, as measured; the same on all ranks.

    Attributes:
        kind: of the exchange.
        codec: in words, its element resolved.
        num_bytes: of the whole tensor before compression, as ``min_bytes`` counts it.
        stock_us: microseconds of the library's own exchange.
        algorithm_us: microseconds of each algorithm of ours.
        relative_errors: ``||x' - x|| / ||x||`` of the result of each, the worst of all ranks.
    """

    kind: MeasuredKind
    codec: str
    num_bytes: int
    stock_us: float
    algorithm_us: Mapping[Algorithm, float]
    relative_errors: Mapping[Algorithm, float]


class Segment(NamedTuple):
    """From this size on, up to that of the next segment, an exchange is compressed and goes by this algorithm."""

    num_bytes: int
    algorithm: Algorithm | None
    """``None``: by default."""


NOT_MEASURED = (Segment(DEFAULT_MIN_BYTES, None),)


@dataclass(frozen=True)
class BreakEven:
    """What was measured of a group, and what follows from it.

    Attributes:
        timings: all of them.
        segments: by kind and codec, in the order of their sizes; none where compressing never pays. What was not
            measured is compressed from the default of ``min_bytes`` on.
    """

    timings: tuple[Timing, ...]
    segments: Mapping[tuple[MeasuredKind, str], tuple[Segment, ...]] = field(repr=False)
    _found: dict[tuple[MeasuredKind, CodecConfig], tuple[Segment, ...]] = field(
        default_factory=dict, repr=False, compare=False
    )

    @classmethod
    def of(cls, timings: Iterable[Timing]) -> BreakEven:
        """What follows from `timings`."""
        timings = tuple(timings)
        rows: dict[tuple[MeasuredKind, str], list[Timing]] = {}
        for timing in timings:
            rows.setdefault((timing.kind, timing.codec), []).append(timing)
        return cls(timings, {key: segments_of(each) for key, each in rows.items()})

    def covers(self, codec: CodecConfig) -> bool:
        """Whether all kinds of tensor-parallel exchanges were measured with this codec."""
        return all((kind, str(codec)) in self.segments for kind in KINDS)

    def segment(self, kind: MeasuredKind, codec: CodecConfig, num_bytes: int) -> Segment | None:
        """How a tensor of this size is compressed; ``None`` where it is to be sent as it is."""
        found = None
        for segment in self._segments(kind, codec):
            if segment.num_bytes > num_bytes:
                break
            found = segment
        return found

    def min_bytes(self, kind: MeasuredKind, codec: CodecConfig | str) -> int | None:
        """The smallest size that is compressed; ``None`` where compressing never pays."""
        segments = self.segments.get((kind, str(codec)), NOT_MEASURED)
        return segments[0].num_bytes if segments else None

    def refusal(self, kind: MeasuredKind, codec: CodecConfig) -> str:
        """Why a tensor is sent as it is, for whom it is."""
        least = self.min_bytes(kind, codec)
        if least is None:
            return f"min_bytes='auto': compressed {kind} was slower at all sizes that were measured"
        return f"min_bytes='auto': compressed {kind} was not faster below {least} bytes, as measured"

    def merged(self, other: BreakEven) -> BreakEven:
        """Both, for measurements of different codecs."""
        return BreakEven.of((*self.timings, *other.timings))

    def _segments(self, kind: MeasuredKind, codec: CodecConfig) -> tuple[Segment, ...]:
        key = (kind, codec)
        if key not in self._found:  # asked for at each exchange, where spelling the codec out would cost
            self._found[key] = self.segments.get((kind, str(codec)), NOT_MEASURED)
        return self._found[key]


def segments_of(timings: Iterable[Timing]) -> tuple[Segment, ...]:
    """Where compressing pays, by which algorithm, from the timings of one kind and codec.

    >>> sizes = (10, 30, 90)
    >>> times = [Timing("all_gather", "int8", size, size, {"all_gather": 10 + size / 2}, {}) for size in sizes]
    >>> segments_of(times)  # even at 20, and 20% faster at 30
    (Segment(num_bytes=30, algorithm='all_gather'),)
    """
    rows = sorted(timings, key=lambda timing: timing.num_bytes)
    chosen = _fastest(rows)
    losing = [
        index
        for index, (row, algorithm) in enumerate(zip(rows, chosen, strict=True))
        if not _speed_up(row, algorithm) >= PAYS  # a NaN does not pay
    ]
    first = losing[-1] + 1 if losing else 0
    if first == len(rows):
        return ()
    segments = [Segment(rows[first].num_bytes, chosen[first])]
    for index in range(first + 1, len(rows)):
        if chosen[index] != chosen[index - 1]:
            size = _crossing(rows[index - 1], rows[index], chosen[index - 1], chosen[index])
            if not _pays_between(rows[index - 1], rows[index], size, chosen[index - 1]):
                return segments_of(rows[index:])  # where the two meet, neither is faster than what is not compressed
            segments.append(Segment(max(size, segments[-1].num_bytes), chosen[index]))
    return tuple(segments)


def _fastest(rows: list[Timing]) -> list[Algorithm]:
    """Of each row, that of the row before unless another is clearly faster."""
    chosen: list[Algorithm] = []
    for row in rows:
        best = min(row.algorithm_us, key=lambda algorithm: row.algorithm_us[algorithm])
        if chosen and row.algorithm_us[chosen[-1]] <= STICKINESS * row.algorithm_us[best]:
            best = chosen[-1]
        chosen.append(best)
    return chosen


def _speed_up(row: Timing, algorithm: Algorithm) -> float:
    return row.stock_us / row.algorithm_us[algorithm]


def _crossing(before: Timing, after: Timing, old: Algorithm, new: Algorithm) -> int:
    """From which size on `new` is faster than `old`."""
    lead = before.algorithm_us[old] - before.algorithm_us[new]
    following_lead = after.algorithm_us[old] - after.algorithm_us[new]
    if lead >= 0:  # it was a little faster before, and not enough to be chosen
        return after.num_bytes
    return _between(before, after, lead / (lead - following_lead))


def _pays_between(before: Timing, after: Timing, num_bytes: int, algorithm: Algorithm) -> bool:
    """Whether the exchange pays at a size between two measured ones."""
    if num_bytes >= after.num_bytes:
        return _speed_up(after, algorithm) >= PAYS
    share = (num_bytes - before.num_bytes) / (after.num_bytes - before.num_bytes)
    stock_us = before.stock_us + share * (after.stock_us - before.stock_us)
    own_us = before.algorithm_us[algorithm]
    own_us += share * (after.algorithm_us[algorithm] - own_us)
    return stock_us >= PAYS * own_us


def _between(before: Timing, after: Timing, share: float) -> int:
    return math.ceil(before.num_bytes + share * (after.num_bytes - before.num_bytes))
