"""Hand-made timings of exchanges."""

from collections.abc import Sequence
from typing import Any

from lightning_taco import CodecConfig
from lightning_taco.collectives.algorithms import KINDS, algorithms_of
from lightning_taco.collectives.break_even import BreakEven, Timing
from lightning_taco.collectives.break_even_file import Measured
from lightning_taco.collectives.topology import Topology

INT8 = CodecConfig(element="int8")
INT4 = CodecConfig(element="int4")
TOPOLOGY = Topology("here", 2, "0 0", "cpu (x)", "gloo", "float32", "torch 2", "")


def timing(size: int, stock_us: float, kind: Any = "all_gather", codec: CodecConfig = INT8, **us: float) -> Timing:
    """One hand-made timing; `us` are those of our algorithms."""
    return Timing(kind, str(codec), size, stock_us, us, {name: 0.01 for name in us})  # type: ignore[arg-type, misc]


def all_algorithms(kind: Any, microseconds: float = 1.0, num_ranks: int = 2) -> dict[str, float]:
    return {algorithm: microseconds for algorithm in algorithms_of(kind, num_ranks)}


def hand_made(
    least: int | None = 100, codecs: Sequence[CodecConfig] = (INT8,), topology: Topology = TOPOLOGY
) -> Measured:
    """Timings by which compressing pays from `least` bytes on, or never."""
    own, size = (2.0, 100) if least is None else (0.5, least)
    rows = [timing(size, 1.0, kind, codec, **all_algorithms(kind, own)) for codec in codecs for kind in KINDS]
    return Measured(topology, BreakEven.of(rows))
