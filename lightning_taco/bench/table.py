"""The figures of a bench, for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from lightning_taco.collectives.algorithms import KINDS
from lightning_taco.collectives.break_even import PAYS, BreakEven, Timing
from lightning_taco.collectives.break_even_file import Measured
from lightning_taco.collectives.traffic import Kind, compressed_sent_bytes, stock_sent_bytes
from lightning_taco.config import CodecConfig
from lightning_taco.strategies.report import format_bytes

ITEM_BYTES = {"float32": 4, "bfloat16": 2}


def print_figures(measured: Measured, codecs: Sequence[CodecConfig], copy_rate: float, console: Console) -> None:
    """Print a table for each kind and codec, the ceilings, and from which sizes on compressing pays."""
    console.print(f"lightning_taco bench: {measured.topology}", highlight=False)
    timings = measured.break_even.timings
    kinds = [kind for kind in KINDS if any(timing.kind == kind for timing in timings)]
    for kind in kinds:
        for codec in codecs:
            console.print(timing_table(kind, codec, measured))
    console.print(ceilings(timings, measured.topology.num_ranks, copy_rate), highlight=False)
    console.print(break_even_table(kinds, codecs, measured.break_even))


def timing_table(kind: Kind, codec: CodecConfig, measured: Measured) -> Table:
    """One row for each size and algorithm; a speed-up of 1 or more is green."""
    table = Table(title=f"{kind}, {codec}")
    for name in ("size", "by", "stock us", "compressed us", "speed-up", "bytes allow", "error"):
        table.add_column(name, justify="left" if name == "by" else "right")
    for timing in measured.break_even.timings:
        if (timing.kind, timing.codec) == (kind, str(codec)):
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


def bytes_allow(timing: Timing, algorithm: str, codec: CodecConfig, measured: Measured) -> str:
    """The speed-up if nothing but the bytes on the wire took time: those of the stock exchange over ours.

    Nothing for an algorithm that uses two kinds of links.
    """
    if algorithm == "hierarchical":
        return ""
    num_ranks = measured.topology.num_ranks
    num_shards = num_ranks if timing.kind == "all_gather" else 1
    local_bytes = timing.num_bytes // num_shards
    num_values = local_bytes // ITEM_BYTES[measured.topology.dtype]
    one_shot = algorithm == "one_shot"
    sent = compressed_sent_bytes(timing.kind, num_values, num_ranks, codec, one_shot=one_shot)
    return f"{stock_sent_bytes(timing.kind, local_bytes, num_ranks) / sent:.2f}x"


def ceilings(timings: Sequence[Timing], num_ranks: int, copy_rate: float) -> str:
    """What bounds every exchange here: the memory, and the link as the library's own exchanges use it."""
    parts = [f"a copy moves {copy_rate:,.1f} GB/s of memory, reads and writes"]
    for kind in KINDS:
        rates = {
            stock_sent_bytes(kind, timing.num_bytes // (num_ranks if kind == "all_gather" else 1), num_ranks)
            / timing.stock_us
            / 1e3
            for timing in timings
            if timing.kind == kind
        }
        if rates:
            parts.append(f"{kind} sends {max(rates):,.2f} GB/s a rank")
    return "Ceilings: " + "; ".join(parts)


def break_even_table(kinds: Sequence[Kind], codecs: Sequence[CodecConfig], break_even: BreakEven) -> Table:
    """From which size on each codec pays."""
    table = Table(title="compressing pays from this size on")
    table.add_column("codec")
    for kind in kinds:
        table.add_column(kind, justify="right")
    for codec in codecs:
        sizes = [break_even.min_bytes(kind, codec) for kind in kinds]
        table.add_row(str(codec), *("never" if size is None else format_bytes(size) for size in sizes))
    return table
