"""The figures of a bench, for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from lightning_taco.codec import MessageLayout
from lightning_taco.collectives.algorithms import DATA_PARALLEL_KINDS, KINDS, MEASURED_KINDS, MeasuredKind
from lightning_taco.collectives.break_even import PAYS, BreakEven, Timing
from lightning_taco.collectives.break_even_file import Measured
from lightning_taco.collectives.traffic import Kind, compressed_sent_bytes, stock_sent_bytes
from lightning_taco.config import CodecConfig
from lightning_taco.strategies.report import format_bytes

ITEM_BYTES = {"float32": 4, "bfloat16": 2}
STOCK_KIND: dict[MeasuredKind, Kind] = {
    **{kind: kind for kind in KINDS},
    "gradient_reduce_scatter": "reduce_scatter",
    "weight_all_gather": "all_gather",
}
"""What the library itself does."""


def print_figures(measured: Measured, codecs: Mapping[str, CodecConfig], copy_rate: float, console: Console) -> None:
    """Print a table for each kind and codec, the ceilings, and from which sizes on compressing pays.

    Args:
        measured: what was.
        codecs: in words to themselves, those of which a row has one.
        copy_rate: GB/s of a copy within memory.
        console: where to.
    """
    console.print(f"lightning_taco bench: {measured.topology}", highlight=False)
    timings = measured.break_even.timings
    kinds = [kind for kind in MEASURED_KINDS if any(timing.kind == kind for timing in timings)]
    for kind in kinds:
        for codec in dict.fromkeys(timing.codec for timing in timings if timing.kind == kind):
            console.print(timing_table(kind, codec, codecs.get(codec), measured))
    console.print(ceilings(timings, measured.topology.num_ranks, copy_rate), highlight=False)
    for title, group in (("", KINDS), (" between data-parallel ranks", DATA_PARALLEL_KINDS)):
        present = [kind for kind in kinds if kind in group]
        if present:
            console.print(break_even_table(present, measured.break_even, title))


def timing_table(kind: MeasuredKind, name: str, codec: CodecConfig | None, measured: Measured) -> Table:
    """One row for each size and algorithm; a speed-up that pays is green."""
    table = Table(title=f"{kind}, {name}")
    for column in ("size", "by", "stock us", "compressed us", "speed-up", "bytes allow", "error"):
        table.add_column(column, justify="left" if column == "by" else "right")
    for timing in measured.break_even.timings:
        if (timing.kind, timing.codec) == (kind, name):
            for algorithm, microseconds in timing.algorithm_us.items():
                gain = timing.stock_us / microseconds
                table.add_row(
                    format_bytes(timing.num_bytes),
                    algorithm,
                    f"{timing.stock_us:,.1f}",
                    f"{microseconds:,.1f}",
                    f"[{'green' if gain >= PAYS else 'red'}]{gain:.2f}x",
                    bytes_allow(timing, algorithm, codec, measured),
                    f"{timing.relative_errors[algorithm]:.2%}",
                )
    return table


def bytes_allow(timing: Timing, algorithm: str, codec: CodecConfig | None, measured: Measured) -> str:
    """The speed-up if nothing but the bytes on the wire took time: those of the stock exchange over ours.

    Nothing for an algorithm that uses two kinds of links, or two codecs.
    """
    if algorithm == "hierarchical" or codec is None:
        return ""
    num_ranks, item_bytes = measured.topology.num_ranks, ITEM_BYTES[measured.topology.dtype]
    if timing.kind == "gradient_reduce_scatter" or timing.kind == "weight_all_gather":
        # Either way as many messages as the stock exchange has shards.
        shard_bytes = timing.num_bytes // num_ranks
        return f"{shard_bytes / MessageLayout.of(shard_bytes // item_bytes, codec).message_bytes:.2f}x"
    local_bytes = _local_bytes(timing, num_ranks)
    one_shot = algorithm == "one_shot"
    sent = compressed_sent_bytes(timing.kind, local_bytes // item_bytes, num_ranks, codec, one_shot=one_shot)
    return f"{stock_sent_bytes(timing.kind, local_bytes, num_ranks) / sent:.2f}x"


def ceilings(timings: Sequence[Timing], num_ranks: int, copy_rate: float) -> str:
    """What bounds every exchange here: the memory, and the link as the library's own exchanges use it."""
    parts = [f"a copy moves {copy_rate:,.1f} GB/s of memory, reads and writes"]
    for kind in MEASURED_KINDS:
        rates = {
            stock_sent_bytes(STOCK_KIND[kind], _local_bytes(timing, num_ranks), num_ranks) / timing.stock_us / 1e3
            for timing in timings
            if timing.kind == kind
        }
        if rates:
            parts.append(f"{kind} sends {max(rates):,.2f} GB/s a rank")
    return "Ceilings: " + "; ".join(parts)


def break_even_table(kinds: Sequence[MeasuredKind], break_even: BreakEven, where: str = "") -> Table:
    """From which size on each codec pays."""
    table = Table(title=f"compressing pays{where} from this size on")
    table.add_column("codec")
    for kind in kinds:
        table.add_column(kind, justify="right")
    for codec in dict.fromkeys(timing.codec for timing in break_even.timings if timing.kind in kinds):
        table.add_row(codec, *(_least(break_even, kind, codec) for kind in kinds))
    return table


def _least(break_even: BreakEven, kind: MeasuredKind, codec: str) -> str:
    if (kind, codec) not in break_even.segments:
        return ""
    size = break_even.min_bytes(kind, codec)
    return "never" if size is None else format_bytes(size)


def _local_bytes(timing: Timing, num_ranks: int) -> int:
    """What a rank has of the whole tensor before the exchange."""
    return timing.num_bytes // (num_ranks if STOCK_KIND[timing.kind] == "all_gather" else 1)
