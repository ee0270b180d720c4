"""What ``min_bytes="auto"`` means on the ranks of a run: figures of `lightning-taco bench`, or measured here and now.

1. What this strategy has measured before in this process, on the same group, is taken as it is.
2. Else `cache_path`, where ``lightning-taco bench`` writes, is read by the first rank. It is used if it was measured on
   the same machine, ranks, device, versions and network settings, and with all codecs of the run.
3. Else the exchanges are timed for about ten seconds. Nothing is written.

All ranks of all replicas come to the same result. It is no part of a checkpoint: a resumed run goes by step 2 or 3
again, since it may stand on another machine. Its bits then are those of the broken run only if the sizes that it
measures are; with the file of step 2, or with a number for ``min_bytes``, they are given.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeVar

import torch.distributed as dist

from lightning_taco.collectives.algorithms import KINDS
from lightning_taco.collectives.break_even import BreakEven
from lightning_taco.collectives.break_even_file import Measured, cache_path, load
from lightning_taco.collectives.calibration import Ladder, RankGroup, measure
from lightning_taco.collectives.topology import Topology
from lightning_taco.collectives.traffic import Kind
from lightning_taco.config import CodecConfig, CompressionConfig
from lightning_taco.strategies.report import format_bytes

QUICK = Ladder(sizes=(1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26), rounds=7, seconds=10.0)
PREFIX = "lightning_taco: min_bytes='auto'"
Value = TypeVar("Value")


class Decision(NamedTuple):
    """What was measured, the same on all ranks, and lines for the user."""

    measured: Measured
    lines: list[str]


def decide(
    config: CompressionConfig, element: Literal["e4m3", "int8"], ranks: RankGroup, known: Measured | None = None
) -> Decision:
    """Find out from which sizes on it pays to compress by `config`. All ranks call it, those of replicas too.

    Args:
        config: the settings.
        element: what ``element="auto"`` means.
        ranks: more than one.
        known: what was decided before in this process; the same on all ranks.

    Cost: reading a file and two broadcasts; or ten seconds, of which a GPU with a fast link needs two or three.
    """
    codecs = list(dict.fromkeys(codec.resolved(element) for codec in config.codecs))
    topology = _from_first(Topology.of(ranks.group, ranks.device, ranks.memory is not None), ranks)
    lines: list[str] = []
    if known is None or known.topology != topology:
        known, lines = _from_first(_read(topology, codecs), ranks)
    missing = [codec for codec in codecs if known is None or not known.break_even.covers(codec)]
    if missing:
        start = time.perf_counter()
        found = BreakEven.of(measure(ranks, missing, QUICK))
        lines.append(f"{PREFIX}: measured in {time.perf_counter() - start:.1f} s on {topology}")
        known = Measured(topology, found if known is None else known.break_even.merged(found))
    assert known is not None
    return Decision(known, lines + [f"{PREFIX}: {line}" for line in lines_of(known.break_even, codecs)])


def lines_of(break_even: BreakEven, codecs: Sequence[CodecConfig]) -> list[str]:
    """One line for each kind of exchange: from which size on each codec is used."""
    return [f"{kind}: {'; '.join(_words(break_even, kind, codec) for codec in codecs)}" for kind in KINDS]


def _words(break_even: BreakEven, kind: Kind, codec: CodecConfig) -> str:
    rows = [timing for timing in break_even.timings if (timing.kind, timing.codec) == (kind, str(codec))]
    segments = break_even.segments[kind, str(codec)]
    largest = max(rows, key=lambda timing: timing.num_bytes)
    gain = max(largest.stock_us / microseconds for microseconds in largest.algorithm_us.values())
    at_largest = f"{gain:.2f}x at {format_bytes(largest.num_bytes)}"
    if not segments:
        return f"{codec}: never, as it does not pay ({at_largest})"
    algorithms = dict.fromkeys(str(segment.algorithm) for segment in segments)
    return f"{codec}: from {format_bytes(segments[0].num_bytes)} on, by {', then '.join(algorithms)} ({at_largest})"


def _read(topology: Topology, codecs: Sequence[CodecConfig]) -> tuple[Measured | None, list[str]]:
    """The file's content if it fits, and a line that says so or why not; no line without a file."""
    path = cache_path()
    try:
        measured = load(path)
    except FileNotFoundError:
        return None, []
    except (OSError, ValueError) as error:
        return None, [f"{PREFIX}: {path} is not used: {getattr(error, 'strerror', None) or error}"]
    difference = measured.topology.difference(topology)
    missing = [str(codec) for codec in codecs if not measured.break_even.covers(codec)]
    if difference is not None:
        return None, [f"{PREFIX}: {path} is not used: it was measured with other settings: {difference}"]
    if missing:
        return None, [f"{PREFIX}: {path} is not used: it has no figures for {' and '.join(missing)}"]
    return measured, [f"{PREFIX}: as measured by `lightning-taco bench`, {path}, on {topology}"]


def _from_first(value: Value, ranks: RankGroup) -> Value:
    """The value of the first rank of the first replica, on all ranks."""
    box: list[Any] = [value]
    for group in (ranks.group, ranks.replicas):
        if group is not None:
            dist.broadcast_object_list(box, group=group, group_src=0, device=ranks.device)
    return box[0]
