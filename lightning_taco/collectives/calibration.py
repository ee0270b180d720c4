"""Times the library's exchanges and the compressed ones on a group, side by side, for `break_even`.

1. Every exchange of one kind and size takes its turn in each round, so that what changes meanwhile hits all alike.
2. In a round all ranks begin together, and each times a few calls, by events on CUDA and by the host's clock elsewhere.
3. The slowest rank's time of a round counts, agreed by one all-reduce of all times; of the rounds, the median.

So all ranks hold the same numbers, whatever their clocks say, and what follows from them is the same.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_taco import _compat
from lightning_taco.collectives.algorithms import KINDS, Algorithm, MeasuredKind, algorithms_of, exchange, overlaps
from lightning_taco.collectives.break_even import Timing
from lightning_taco.collectives.hierarchy import Hierarchy
from lightning_taco.collectives.peer_memory import PeerMemory
from lightning_taco.collectives.traffic import Kind
from lightning_taco.config import BITS_PER_CODE, CodecConfig

HIDDEN = 1024
"""Size of the last dim, rounded up to a multiple of the ranks."""
SEQUENCES = 2
"""Size of the first dim; the second is the one that is cut and joined, as under sequence parallelism."""
SPAN_S = 2e-3
"""What is timed as a whole: short calls are repeated to fill it."""
MAX_CALLS = 20
NUM_WARM_UPS = 2

Call = Callable[[], Tensor]
Clock = Callable[[], float]
Name = tuple[str, Algorithm]
"""Of a call of ours: the codec in words, and the algorithm."""


@dataclass(frozen=True, kw_only=True)
class Ladder:
    """What is measured.

    Args:
        sizes: bytes of the whole tensor, ascending; rounded up so that all ranks have equal shards.
        rounds: in which exchanges take turns.
        seconds: when the next size would probably end later than this, it and all larger ones are left out. The first
            is always measured; kernels that are compiled for it do not count.
        kinds: of exchanges.
    """

    sizes: Sequence[int]
    rounds: int = 7
    seconds: float = float("inf")
    kinds: Sequence[MeasuredKind] = KINDS


@dataclass(frozen=True)
class Contest:
    """Exchanges of the same values, to be timed against one another.

    Attributes:
        kind: of the exchange.
        num_bytes: of the whole tensor, as ``min_bytes`` counts it.
        stock: the library's own exchange.
        ours: by codec and algorithm.
        code_bits: of the narrowest code of each codec in words.
    """

    kind: MeasuredKind
    num_bytes: int
    stock: Call
    ours: Mapping[Name, Call]
    code_bits: Mapping[str, int]

    @property
    def calls(self) -> tuple[Call, ...]:
        """All of them, the library's own first."""
        return (self.stock, *self.ours.values())


ContestOf = Callable[[MeasuredKind, int], Contest]
"""Makes that of a kind of exchange and about so many bytes."""


@dataclass(frozen=True)
class RankGroup:
    """Who measures.

    Args:
        group: the ranks that exchange.
        device: of this rank.
        replicas: the ranks at this rank's place of other groups that measure at the same time and are to come to the
            same result; ``None`` when there are none.
        hierarchy: of a group that spans hosts; ``None`` for one that does not.
        memory: what the ranks have mapped of each other; ``None`` where they have not.
        clock: seconds.
    """

    group: dist.ProcessGroup
    device: torch.device
    replicas: dist.ProcessGroup | None = None
    hierarchy: Hierarchy | None = None
    memory: PeerMemory | None = None
    clock: Clock = time.perf_counter

    def slowest(self, values: Sequence[Sequence[float]]) -> list[list[float]]:
        """The largest of each number over all ranks, the same on each of them. Waits for the device."""
        table = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(table, op=dist.ReduceOp.MAX, group=self.group)
        if self.replicas is not None:
            dist.all_reduce(table, op=dist.ReduceOp.MAX, group=self.replicas)
        return table.tolist()

    def algorithms(self, kind: Kind) -> tuple[Algorithm, ...]:
        """Those that these ranks can exchange by."""
        return algorithms_of(
            kind,
            self.group.size(),
            self.hierarchy is not None,
            overlaps=overlaps(self.group),
            has_peer_memory=self.memory is not None,
        )

    def meet(self) -> None:
        """Wait for all ranks, and for the device."""
        self.slowest([[0.0]])


def measuring_dtype(device: torch.device) -> torch.dtype:
    """What is exchanged to measure: bf16 on CUDA, where fp32 tensors of as many bytes gain more; fp32 on CPU."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def measure(ranks: RankGroup, codecs: Sequence[CodecConfig], ladder: Ladder) -> Iterator[Timing]:
    """`measure_contests` for tensor-parallel exchanges by `codecs`, their element resolved."""
    return measure_contests(ranks, ladder, lambda kind, size: contest(kind, size, ranks, codecs))


def measure_contests(ranks: RankGroup, ladder: Ladder, contest_of: ContestOf) -> Iterator[Timing]:
    """Time all exchanges of `ladder`, one size after the other. All ranks call it and take as many results.

    Args:
        ranks: more than one.
        ladder: what to measure.
        contest_of: makes the exchanges of one kind and size.

    Yields:
        One timing for each kind, codec and size, the same on all ranks.

    Cost: a few milliseconds for each exchange and round; tensors of the largest size, a few of them at a time.
    """
    _compile(ranks, ladder, contest_of)
    start = last = ranks.clock()
    for index, size in enumerate(ladder.sizes):
        for kind in ladder.kinds:
            yield from _measure_contest(contest_of(kind, size), ranks, ladder.rounds)
        now = ranks.clock()
        growth = ladder.sizes[index + 1] / size if index + 1 < len(ladder.sizes) else 1.0
        # The same on all ranks, so they all go on or all stop.
        ((elapsed, expected),) = ranks.slowest([[now - start, (now - last) * growth]])
        if elapsed + expected > ladder.seconds:
            return
        last = now


def contest(kind: MeasuredKind, size: int, ranks: RankGroup, codecs: Sequence[CodecConfig]) -> Contest:
    """The exchanges of one kind, a tensor-parallel one, and size."""
    assert kind != "gradient_reduce_scatter"
    assert kind != "weight_all_gather"
    tensor, num_bytes = example_tensor(kind, size, ranks.group, ranks.device)
    ours = {
        (str(codec), algorithm): compressed_call(kind, tensor, codec, ranks, algorithm)
        for codec in codecs
        for algorithm in ranks.algorithms(kind)
    }
    code_bits = {str(codec): BITS_PER_CODE[codec.element] for codec in codecs}
    return Contest(kind, num_bytes, stock_call(kind, tensor, ranks.group), ours, code_bits)


def _measure_contest(between: Contest, ranks: RankGroup, rounds: int) -> Iterator[Timing]:
    stock_us, *own_us = _interleaved_us(between.calls, ranks, rounds)
    exact = between.stock()
    (errors,) = ranks.slowest([[relative_error(call(), exact) for call in between.ours.values()]])
    times, found = dict(zip(between.ours, own_us, strict=True)), dict(zip(between.ours, errors, strict=True))
    for codec in dict.fromkeys(codec for codec, _ in between.ours):
        algorithms = [algorithm for name, algorithm in between.ours if name == codec]
        algorithm_us = {algorithm: times[codec, algorithm] for algorithm in algorithms}
        relative_errors = {algorithm: found[codec, algorithm] for algorithm in algorithms}
        yield Timing(between.kind, codec, between.num_bytes, stock_us, algorithm_us, relative_errors)


def _compile(ranks: RankGroup, ladder: Ladder, contest_of: ContestOf) -> None:
    for kind in ladder.kinds:
        for call in contest_of(kind, ladder.sizes[0]).calls:
            call()
    ranks.meet()


def example_tensor(kind: Kind, size: int, group: dist.ProcessGroup, device: torch.device) -> tuple[Tensor, int]:
    """What this rank exchanges, ``[2, tokens, 1024]`` of normal values, and the bytes that ``min_bytes`` sees of it."""
    num_ranks, dtype = group.size(), measuring_dtype(device)
    hidden = -(-HIDDEN // num_ranks) * num_ranks
    row_bytes = SEQUENCES * hidden * dtype.itemsize
    tokens = max(1, -(-size // (row_bytes * num_ranks))) * num_ranks
    num_bytes = tokens * row_bytes
    local_tokens = tokens // num_ranks if kind == "all_gather" else tokens
    generator = torch.Generator(device).manual_seed(group.rank())  # leaves the run's own generators alone
    tensor = torch.randn(SEQUENCES, local_tokens, hidden, device=device, generator=generator).to(dtype)
    return tensor, num_bytes


def stock_call(kind: Kind, tensor: Tensor, group: dist.ProcessGroup) -> Call:
    """The library's own exchange, as DTensor asks for it."""
    return lambda: _compat.stock_exchange(tensor, kind, "sum", 1, 2, group)


def compressed_call(kind: Kind, tensor: Tensor, codec: CodecConfig, ranks: RankGroup, algorithm: Algorithm) -> Call:
    """Our exchange by `algorithm`; with sorted channels if the codec has them."""
    run = functools.partial(
        exchange, kind, group=ranks.group, algorithm=algorithm, ranks=ranks.hierarchy, memory=ranks.memory, dim=1
    )
    if codec.reshape == "calibrated" and kind != "all_to_all":  # of its two dims one is that of the channels
        plain = replace(codec, reshape="natural")
        order = torch.arange(tensor.shape[-1], device=tensor.device).flip(0)  # its own inverse
        return lambda: run(tensor.index_select(-1, order), plain).index_select(-1, order)
    return lambda: run(tensor, codec, scatter_dim=2)


def relative_error(result: Tensor, exact: Tensor) -> float:
    """``||result - exact|| / ||exact||``, in fp32; NaN when either holds one."""
    return ((result.float() - exact.float()).norm() / exact.float().norm()).item()


def _interleaved_us(calls: Sequence[Call], ranks: RankGroup, rounds: int) -> list[float]:
    """Microseconds of each call, the same on all ranks."""
    for call in calls:
        for _ in range(NUM_WARM_UPS):
            call()
    estimates = ranks.slowest([[_span(call, 1, ranks) for call in calls]])[0]
    counts = [max(1, min(MAX_CALLS, int(SPAN_S / max(estimate, 1e-9)))) for estimate in estimates]
    spans = [[_span(call, count, ranks) for call, count in zip(calls, counts, strict=True)] for _ in range(rounds)]
    by_call = zip(*ranks.slowest(spans), strict=True)
    return [1e6 * statistics.median(times) / count for times, count in zip(by_call, counts, strict=True)]


def _span(call: Call, count: int, ranks: RankGroup) -> float:
    """Seconds of `count` calls that all ranks begin together."""
    ranks.meet()
    if count > 1:
        call()  # so that ranks which go on later cost those that are timed nothing
    if ranks.device.type != "cuda":
        start = ranks.clock()
        for _ in range(count):
            call()
        return ranks.clock() - start
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3
