"""What the user reads: the lines at the start, and the table at the end."""

from __future__ import annotations

from collections.abc import Mapping

from lightning.fabric.utilities.rank_zero import rank_zero_only
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import DeviceMesh

from lightning_taco.activations import Ledger
from lightning_taco.collectives.traffic import TrafficCount, TrafficCounters
from lightning_taco.config import CodecConfig, CompressionConfig
from lightning_taco.data_parallel.traffic import WHAT, DataParallelTraffic
from lightning_taco.dtensor.errors import ErrorKey, SiteError
from lightning_taco.dtensor.session import COMPRESSED
from lightning_taco.pipeline_parallel.transfers import Counts


def start_lines(config: CompressionConfig | None, element: str, mesh: DeviceMesh) -> list[str]:
    """What will be compressed, one line a fact."""
    names = mesh.mesh_dim_names or ()
    sizes = ", ".join(f"{name}={mesh.size(axis)}" for axis, name in enumerate(names))
    lines = [f"lightning_taco: mesh {sizes}"]
    if config is None:
        return [*lines, "lightning_taco: compression is off; tensors travel as they are"]
    for direction, codec in (("forward", config.forward), ("backward", config.backward)):
        lines.append(f"lightning_taco: {direction}: {_codec_text(codec, element)}")
    least = "the size from which on it pays" if config.min_bytes == "auto" else format_bytes(config.min_bytes)
    lines.append(
        "lightning_taco: compressed are exchanges of intermediate tensors over the tensor_parallel axis of at least "
        f"{least}, in training" + (" and evaluation" if config.during_validation else "")
    )
    if config.exclude:
        lines.append(f"lightning_taco: sent as they are: modules matching {', '.join(config.exclude)}")
    for pattern, recipe in config.recipes.items():
        lines.append(f"lightning_taco: modules matching {pattern} use the recipe {recipe!r}")
    return lines


def end_table(traffic: TrafficCounters, errors: Mapping[ErrorKey, SiteError]) -> Table:
    """Bytes that would have been sent and bytes sent by one rank, their ratio, and the worst site."""
    table = Table(title="lightning_taco: what one rank sent over the tensor-parallel axis")
    for name in ("exchange", "messages", "would have been sent", "sent", "ratio"):
        table.add_column(name, justify="left" if name == "exchange" else "right")
    for direction in ("forward", "backward"):
        for kind in ("all_reduce", "reduce_scatter", "all_gather", "all_to_all"):
            count = traffic.total(outcome=COMPRESSED, kind=kind, direction=direction)
            if count.num_messages:
                table.add_row(f"{kind}, {direction}", *_cells(count))
    everything, compressed = traffic.total(), traffic.total(outcome=COMPRESSED)
    if everything.num_messages > compressed.num_messages:
        table.add_row("not compressed", *_cells(_difference(everything, compressed)))
    table.add_section()
    table.add_row("all", *_cells(everything))
    table.caption = worst_site_text(errors)
    return table


def data_parallel_table(traffic: DataParallelTraffic) -> Table:
    """The same for what travels between data-parallel ranks, by what it is, with the bits of a value."""
    table = Table(title="lightning_taco: what one rank sent between data-parallel ranks")
    for name in ("what", "messages", "would have been sent", "sent", "ratio", "bits a value"):
        table.add_column(name, justify="left" if name == "what" else "right")
    for what in WHAT:
        count = TrafficCount()
        for key, each in traffic.counts.items():
            if key.site == what and key.outcome == COMPRESSED:
                count.add(each)
        if count.num_messages:
            table.add_row(what, *_cells(count), f"{traffic.bits_per_value(what):.2f}")
    everything, compressed = traffic.total(), traffic.total(outcome=COMPRESSED)
    if everything.num_messages > compressed.num_messages:
        table.add_row("not compressed", *_cells(_difference(everything, compressed)), "")
    table.add_section()
    table.add_row("all", *_cells(everything), "")
    return table


def print_data_parallel_table(traffic: DataParallelTraffic, console: Console | None = None) -> None:
    """Print `data_parallel_table`, and why messages were not compressed."""
    console = console or Console()
    console.print(data_parallel_table(traffic))
    _print_reasons(traffic, console)


def print_end_table(
    traffic: TrafficCounters, errors: Mapping[ErrorKey, SiteError], console: Console | None = None
) -> None:
    """Print `end_table`, and why exchanges were not compressed."""
    console = console or Console()
    console.print(end_table(traffic, errors))
    _print_reasons(traffic, console)


def _print_reasons(traffic: TrafficCounters, console: Console) -> None:
    for reason, count in sorted(traffic.stock_reasons().items(), key=lambda item: -item[1]):
        console.print(f"  not compressed, {count} messages: {reason}", markup=False, highlight=False)


def pipeline_table(counts: Counts) -> Table:
    """What crossed each border of one rank's stages, sent by it and received."""
    table = Table(title="lightning_taco: what crossed the borders of one rank's pipeline stages")
    for name in ("border", "messages", "would have been sent", "sent", "ratio"):
        table.add_column(name, justify="left" if name == "border" else "right")
    for what, traffic in (("sent", counts.sent), ("received", counts.received)):
        for key, count in sorted(traffic.counts.items()):
            border = key.site.partition("/")[0].replace("_", " ")
            note = "" if key.outcome == COMPRESSED else ", as it is"
            table.add_row(f"{border}, {key.direction}, {what}{note}", *_cells(count))
    return table


def print_pipeline_table(counts: Counts, console: Console | None = None) -> None:
    """Print `pipeline_table`, and why messages were not compressed."""
    if not counts.sent.counts and not counts.received.counts:
        return
    console = console or Console()
    console.print(pipeline_table(counts))
    _print_reasons(counts.sent, console)


def axes_table(tensor: TrafficCounters, pipeline: TrafficCounters, data: TrafficCounters) -> Table:
    """Bytes that one rank sent over each axis of the mesh."""
    table = Table(title="lightning_taco: bytes by axis, sent by one rank")
    for name in ("axis", "messages", "would have been sent", "sent", "ratio"):
        table.add_column(name, justify="left" if name == "axis" else "right")
    total = TrafficCount()
    for axis, traffic in (("tensor_parallel", tensor), ("pipeline_parallel", pipeline), ("data_parallel", data)):
        count = traffic.total()
        total.add(count)
        table.add_row(axis, *_cells(count))
    table.add_section()
    table.add_row("all", *_cells(total))
    return table


@rank_zero_only
def print_axes_table(
    tensor: TrafficCounters, pipeline: TrafficCounters, data: TrafficCounters, console: Console | None = None
) -> None:
    """Print `axes_table`, on rank 0."""
    (console or Console()).print(axes_table(tensor, pipeline, data))


def stored_table(ledger: Ledger) -> Table:
    """What one forward stored for its backward on one rank, by kind of operation and by layer."""
    table = Table(title="lightning_taco: what one forward stored for its backward on one rank")
    for name in ("of", "tensors", "would have been stored", "stored", "ratio"):
        table.add_column(name, justify="left" if name == "of" else "right")
    for rows in (ledger.by_kind(), ledger.by_layer(), {"all": ledger.total}):
        for name, row in rows.items():
            cells = format_bytes(row.stock_bytes), format_bytes(row.stored_bytes), f"{row.ratio:.2f}x"
            table.add_row(name or "(outside any module)", str(row.num_tensors), *cells)
        table.add_section()
    return table


def print_stored_table(ledger: Ledger, console: Console | None = None) -> None:
    """Print `stored_table`."""
    (console or Console()).print(stored_table(ledger))


def worst_site_text(errors: Mapping[ErrorKey, SiteError]) -> str | None:
    """The site with the largest relative error, in words; ``None`` when nothing was sampled."""
    if not errors:
        return None
    key = max(errors, key=lambda candidate: errors[candidate].relative_l2_error)
    error = errors[key]
    place = f"worst site: {key.site or '(outside any module)'}, {key.direction} {key.kind}"
    if error.num_nonfinite:
        return f"{place}: {error.num_nonfinite} of {error.num_values} values were NaN or Inf"
    return f"{place}: relative L2 error {error.relative_l2_error:.2%} ({error.decibels:.1f} dB)"


def format_bytes(num_bytes: float) -> str:
    """Bytes with a binary unit.

    >>> format_bytes(1536)
    '1.5 KiB'
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def _codec_text(codec: CodecConfig | None, element: str) -> str:
    if codec is None:
        return "as it is"
    resolved = codec.resolved(element)  # type: ignore[arg-type]
    chosen = " (chosen for this device)" if codec.element == "auto" else ""
    return f"{resolved}{chosen}, {resolved.bits_per_value:g} bits a value"


def _cells(count: TrafficCount) -> tuple[str, str, str, str]:
    return (
        str(count.num_messages),
        format_bytes(count.stock_bytes),
        format_bytes(count.sent_bytes),
        f"{count.ratio:.2f}x",
    )


def _difference(whole: TrafficCount, part: TrafficCount) -> TrafficCount:
    return TrafficCount(
        num_messages=whole.num_messages - part.num_messages,
        stock_bytes=whole.stock_bytes - part.stock_bytes,
        sent_bytes=whole.sent_bytes - part.sent_bytes,
    )
