"""Predicts how the gain grows with the tensor-parallel degree, from what two GPUs measured: a table and a plot.

    python -m examples.benchmarks.predict_scaling examples/results/scaling_inputs_2x_h200_2026-11-30.json
    python -m examples.benchmarks.predict_scaling inputs.json --measured scaling.json --plot scaling.html

The file of inputs has the times of the library's and of compressed exchanges at some sizes on each link, those of
kernels, and steps: see the one in `examples/results`. `link_model` says what is assumed of exchanges. Of steps:

* a step is computing, of which tensor parallelism divides a share (`divided`), and exchanges, which nothing hides. What
  two ranks computed is a step without compression less its exchanges, averaged over the links that measured one. The
  batch is the same at all degrees. Where the host holds a step, neither more ranks nor fewer bytes make it faster: that
  is not in it.
* 3D: eight ranks, two along each axis, so exchanges are those of two ranks, on a link that all eight share. Computing
  (bubble included) and the share of the pipeline's and of the data-parallel exchanges that nothing hides (`exposed`)
  are given as ranges. Kernels of SDP4Bit are taken for those of `int4gs`.

Each figure has a range: the least and the most over all corners of what is not known (`contention`, `hop_us`,
`all_to_all`, `divided`, `exposed`). It is no confidence interval, and says nothing of what the model leaves out. The
figure itself lies at the middle of each. With `--measured` the JSON of `scaling.py` is set beside.
"""

import argparse
import itertools
import json
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from examples.benchmarks import scaling
from examples.benchmarks.collectives import CODECS
from examples.benchmarks.link_model import (
    KERNEL_VALUES,
    MEBI,
    VALUE_BYTES,
    Assumptions,
    Codec,
    Exchanges,
    Kernels,
    Line,
    Link,
    Mapped,
    fit_line,
    two_hosts,
)
from lightning_taco.data_parallel.settings import weight_differences

RANKS = (2, 4, 8)
SIZE_MIB = 64
RECIPES: dict[str, tuple[str | None, str | None]] = {
    "none": (None, None),
    "int8": ("int8", "int8"),
    "balanced": ("int6g", "int4gs"),
}
"""Codecs forward and backward."""
MAPPED = ", mapped"
ALL_REDUCE, STEP, THREE_D = f"all-reduce, {SIZE_MIB} MiB", "step", "3D 2x2x2 step"


@dataclass(frozen=True)
class Inputs:
    """A file of inputs, with lines fitted to its points."""

    links: Mapping[str, Link]
    codecs: Mapping[str, Codec]
    content: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path) -> "Inputs":
        """From a file.

        Raises:
            KeyError: for what is missing in it.
        """
        content = json.loads(path.read_text())
        codecs = {name: Codec(CODECS[name], Kernels(**each)) for name, each in content["kernels_us"].items()}
        host_us = content["host_us_per_launch"]
        links = {name: _link(each, codecs["int8"], host_us) for name, each in content["links"].items()}
        return cls(links, codecs, content)


@dataclass(frozen=True)
class Prediction:
    """A speed-up over what is not compressed.

    Attributes:
        what: is faster.
        codec: or recipe.
        link: on which.
        num_ranks: of the tensor-parallel group; of all axes together for 3D.
        speedup: with the middle of each assumption.
        low: least over their corners.
        high: most.
        measured: if it was.
    """

    what: str
    codec: str
    link: str
    num_ranks: int
    speedup: float
    low: float
    high: float
    measured: float | None = None

    @property
    def key(self) -> tuple[str, str, str, int]:
        """What a measurement of the same has too."""
        return self.what, self.codec, self.link, self.num_ranks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("inputs", type=Path)
    parser.add_argument("--measured", type=Path, nargs="+", default=[], help="JSON files of scaling.py")
    parser.add_argument("--plot", type=Path, help="write the plot here, as HTML, or as SVG (needs kaleido)")
    arguments = parser.parse_args()
    inputs = Inputs.read(arguments.inputs)
    outcomes = itertools.chain(*map(scaling.read, arguments.measured))
    predictions = with_measured(predict(inputs), {**measured_by_two(inputs), **measured_by(outcomes)})
    print(table(predictions))
    print(f"\n{hosts_table()}\n\n{residual_table(residuals(inputs))}")
    if arguments.plot:
        from examples.benchmarks.plot_scaling import plot

        figure = plot(predictions)
        figure.write_html(arguments.plot) if arguments.plot.suffix == ".html" else figure.write_image(arguments.plot)


def predict(inputs: Inputs) -> list[Prediction]:
    """All-reduces and steps on each link at each number of ranks, and 3D on tcp."""
    found = []
    for name, link in inputs.links.items():
        for codec in inputs.codecs:
            found += _over_ranks(ALL_REDUCE, codec, name, inputs, _all_reduce_of(link, inputs.codecs[codec], False))
        if link.mapped:
            way = _all_reduce_of(link, inputs.codecs["int8"], True)
            found += _over_ranks(ALL_REDUCE, f"int8{MAPPED}", name, inputs, way)
        recipes = [recipe for recipe in RECIPES if recipe != "none"]
        for recipe in [*recipes, *([f"int8{MAPPED}"] if link.mapped else [])]:
            found += _over_ranks(STEP, recipe, name, inputs, _step_of(inputs, link, recipe))
    if "tcp" in inputs.links:
        found += [_three_d(inputs, "tcp", recipe) for recipe in RECIPES if recipe != "none"]
    return found


def step_ms(
    inputs: Inputs,
    link: Link,
    num_ranks: int,
    recipe: str,
    assumptions: Assumptions,
    directions: Iterable[str] = ("forward", "backward"),
) -> float:
    """Milliseconds of a step whose exchanges in `directions` are compressed; ``"int8, mapped"`` in mapped memory."""
    exchanges = Exchanges(link, num_ranks, assumptions)
    undivided = 1 - assumptions.divided
    compute = compute_ms(inputs) * (undivided + assumptions.divided * 2 / num_ranks)
    name, _, way = recipe.partition(", ")
    total = 0.0
    for place, direction in enumerate(("forward", "backward")):
        codec = RECIPES[name][place] if direction in directions else None
        chosen = None if codec is None else inputs.codecs[codec]
        for each in inputs.content["step"]["exchanges"][direction]:
            total += each["count"] * _exchange_us(exchanges, each, chosen, is_mapped=bool(way))
    return compute + total / 1000


def compute_ms(inputs: Inputs) -> float:
    """What two ranks compute in a step: without compression, less its exchanges, the mean of all links."""
    return statistics.mean(compute_ms_by_link(inputs).values())


def compute_ms_by_link(inputs: Inputs) -> dict[str, float]:
    """The same of each link that measured a step without compression.

    Raises:
        ValueError: when none did.
    """
    found = {}
    for row in inputs.content["step"]["measured_ms"]:
        if row["recipe"] == "none":
            pair = Exchanges(inputs.links[row["link"]], 2)
            parts = [each for parts in inputs.content["step"]["exchanges"].values() for each in parts]
            found[row["link"]] = row["ms"] - sum(each["count"] * _exchange_us(pair, each, None) for each in parts) / 1e3
    if not found:
        raise ValueError("no step without compression was measured; give one in step.measured_ms.")
    return found


def three_d_ms(
    inputs: Inputs, link: Link, recipe: str, assumptions: Assumptions, compute: float, exposed: float
) -> float:
    """Milliseconds of a step on 8 ranks, all axes compressed or, for ``"none"``, none.

    Stages send in 8 bits with ``"int8"`` and in 4 with ``"balanced"``; data-parallel ranks as SDP4Bit does.
    """
    content, exchanges = inputs.content["three_d"], Exchanges(link, 2, assumptions, num_sharing=8)
    is_on = recipe != "none"
    forward, backward = RECIPES[recipe]
    tensor = 0.0
    for each in content["tensor"]:
        halves = [inputs.codecs[codec] if codec else None for codec in (forward, backward)]
        tensor += each["count"] * statistics.mean(_exchange_us(exchanges, each, codec) for codec in halves)
    between = inputs.codecs["int8" if recipe == "int8" else "int4gs"] if is_on else None
    kernels = inputs.codecs["int4gs"].kernels
    data_codecs = {
        "all_gather": Codec(weight_differences(), kernels),
        "reduce_scatter": Codec(CODECS["int4gs"], kernels),
    }
    hidden = sum(each["count"] * _exchange_us(exchanges, each, between) for each in content["pipeline"])
    for each in content["data"]:
        hidden += each["count"] * _exchange_us(exchanges, each, data_codecs[each["kind"]] if is_on else None)
    return compute + (tensor + exposed * hidden) / 1000


def residuals(inputs: Inputs) -> list[tuple[str, float, float]]:
    """What was measured on two ranks, measured and by the model: microseconds, or milliseconds of steps."""
    found: list[tuple[str, float, float]] = []
    for name, link in inputs.links.items():
        pair = Exchanges(link, 2)
        for kind, points in inputs.content["links"][name]["stock_us"].items():
            for size, measured in points:
                model = pair.stock_us(kind, size * MEBI)
                found.append((f"{kind}, {size} MiB, the library's, {name}, us", measured, model))
        for kind, by_codec in inputs.content["links"][name]["compressed_us"].items():
            for codec, points in by_codec.items():
                base, _, way = codec.partition(", ")
                for size, measured, *_ in points:
                    each = {"kind": kind, "mebi_values": size / VALUE_BYTES, "bytes_per_value": VALUE_BYTES}
                    model = _exchange_us(pair, each, inputs.codecs[base], is_mapped=bool(way))
                    found.append((f"{kind}, {size} MiB, {codec}, {name}, us", measured, model))
    for row in inputs.content["step"]["measured_ms"]:
        directions = row.get("directions", ["forward", "backward"])
        model = step_ms(inputs, inputs.links[row["link"]], 2, row["recipe"], Assumptions(), directions)
        only = f", {directions[0]} only" if len(directions) == 1 else ""
        found.append((f"step, {row['recipe']}{only}, {row['link']}, ms", row["ms"], model))
    return found


def measured_by_two(inputs: Inputs) -> dict[tuple[str, str, str, int], float]:
    """Speed-ups that the file of inputs itself has, of two ranks; of steps those with both directions compressed."""
    found = {}
    for name, each in inputs.content["links"].items():
        stock = dict(reversed(each["stock_us"]["all_reduce"]))  # of a size that is there twice the first
        for codec, points in each["compressed_us"]["all_reduce"].items():
            for size, us, *stock_of_its_run in points:
                if size == SIZE_MIB:
                    found[ALL_REDUCE, codec, name, 2] = (stock_of_its_run or [stock[size]])[0] / us
    rows = [row for row in inputs.content["step"]["measured_ms"] if "directions" not in row]
    none = {row["link"]: row["ms"] for row in rows if row["recipe"] == "none"}
    for row in rows:
        if row["recipe"] != "none" and row["link"] in none:
            found[STEP, row["recipe"], row["link"], 2] = none[row["link"]] / row["ms"]
    return found


def measured_by(outcomes: Iterable[scaling.Outcome]) -> dict[tuple[str, str, str, int], float]:
    """Speed-ups that `scaling.py` measured, by the key of a `Prediction`."""
    found: dict[tuple[str, str, str, int], float] = {}
    for outcome in outcomes:
        run = outcome.run
        if outcome.status != "ok":
            continue
        if run.benchmark == "collectives":
            for row in outcome.result["collectives"]:
                if row["kind"] == "all_reduce" and row["MiB"] == SIZE_MIB and row["algorithm"]:
                    suffix = MAPPED if row["algorithm"] == "peer_memory" else ""
                    key = ALL_REDUCE, f"{row['codec']}{suffix}", run.link, run.num_ranks
                    found[key] = max(found.get(key, 0.0), row["speedup"])
            continue
        for row in outcome.result["rows"][1:]:
            if run.benchmark == "step_time":
                name = row["variant"].replace("+mapped", MAPPED)
                found[STEP, name, run.link, run.num_ranks] = row["speedup"]
            elif row["variant"] == "all":
                found[THREE_D, "int8", run.link, run.num_ranks] = row["speedup"]
    return found


def with_measured(
    predictions: Sequence[Prediction], measured: Mapping[tuple[str, str, str, int], float]
) -> list[Prediction]:
    """The same predictions, with what was measured."""
    return [replace(each, measured=measured.get(each.key)) for each in predictions]


def table(predictions: Sequence[Prediction]) -> str:
    """Markdown: a row for each codec and link, a column for each number of ranks."""
    lines = ["| speed-up of | codec | link | 2 ranks | 4 ranks | 8 ranks |", "|---|---|---|---|---|---|"]
    rows: dict[tuple[str, str, str], dict[int, str]] = {}
    for each in predictions:
        text = f"{each.speedup:.2f}x"
        if each.high - each.low > 0.005:
            text += f" ({each.low:.2f} to {each.high:.2f})"
        if each.measured is not None:
            text += f"; measured **{each.measured:.2f}x**"
        rows.setdefault(each.key[:3], {})[each.num_ranks] = text
    for key, cells in rows.items():
        lines.append(f"| {' | '.join([*key, *(cells.get(number, '') for number in RANKS)])} |")
    return "\n".join(lines)


def residual_table(rows: Sequence[tuple[str, float, float]]) -> str:
    """Markdown: the model against what it was made from."""
    lines = ["| on two ranks | measured | model | off by |", "|---|---|---|---|"]
    lines += [f"| {name} | {was:,.5g} | {model:,.4g} | {100 * (model / was - 1):+.0f}% |" for name, was, model in rows]
    return "\n".join(lines)


def hosts_table() -> str:
    """Markdown: an all-reduce between two hosts whose ranks share one NIC, by the bytes through it alone."""
    lines = [
        "| ranks, on two hosts with a NIC each | codec | flat two-shot | hierarchical |",
        "|---|---|---|---|",
    ]
    for num_ranks in (4, 8, 16):
        for codec in ("int8", "int4gs"):
            sent = two_hosts(num_ranks, 16, CODECS[codec].bits_per_value)  # bytes of a value are bits here
            gains = f"{sent.stock / sent.two_shot:.2f}x | {sent.stock / sent.hierarchical:.2f}x"
            lines.append(f"| {num_ranks} | {codec} | {gains} |")
    return "\n".join(lines)


def corners(link: Link, divided: Sequence[float]) -> Iterator[Assumptions]:
    """All ends of what is not known."""
    for values in itertools.product(sorted(set(link.contention)), link.hop_us, (0.0, 1.0), divided):
        yield Assumptions(*values)


def middle(link: Link, divided: Sequence[float]) -> Assumptions:
    """Half way between them."""
    return Assumptions(*map(statistics.mean, (link.contention, link.hop_us, (0.0, 1.0), divided)))


def _over_ranks(
    what: str, codec: str, link_name: str, inputs: Inputs, speedup_of: Callable[[int, Assumptions], float]
) -> list[Prediction]:
    link, divided = inputs.links[link_name], inputs.content["step"]["divided"]
    found = []
    for num_ranks in RANKS:
        all_of_them = [speedup_of(num_ranks, each) for each in corners(link, divided)]
        central = speedup_of(num_ranks, middle(link, divided))
        found.append(Prediction(what, codec, link_name, num_ranks, central, min(all_of_them), max(all_of_them)))
    return found


def _all_reduce_of(link: Link, codec: Codec, is_mapped: bool) -> Callable[[int, Assumptions], float]:
    each = {"kind": "all_reduce", "mebi_values": SIZE_MIB / VALUE_BYTES, "bytes_per_value": VALUE_BYTES}

    def speedup(num_ranks: int, assumptions: Assumptions) -> float:
        exchanges = Exchanges(link, num_ranks, assumptions)
        return _exchange_us(exchanges, each, None) / _exchange_us(exchanges, each, codec, is_mapped=is_mapped)

    return speedup


def _step_of(inputs: Inputs, link: Link, recipe: str) -> Callable[[int, Assumptions], float]:
    def speedup(num_ranks: int, assumptions: Assumptions) -> float:
        stock = step_ms(inputs, link, num_ranks, "none", assumptions)
        return stock / step_ms(inputs, link, num_ranks, recipe, assumptions)

    return speedup


def _three_d(inputs: Inputs, link_name: str, recipe: str) -> Prediction:
    link, content = inputs.links[link_name], inputs.content["three_d"]

    def speedup(assumptions: Assumptions, compute: float, exposed: float) -> float:
        stock = three_d_ms(inputs, link, "none", assumptions, compute, exposed)
        return stock / three_d_ms(inputs, link, recipe, assumptions, compute, exposed)

    ends = itertools.product(corners(link, [1.0]), content["compute_ms"], content["exposed"])
    all_of_them = [speedup(*each) for each in ends]
    middles = [statistics.mean(content[name]) for name in ("compute_ms", "exposed")]
    central = speedup(middle(link, [1.0]), *middles)
    return Prediction(THREE_D, recipe, link_name, 8, central, min(all_of_them), max(all_of_them))


def _exchange_us(
    exchanges: Exchanges, each: Mapping[str, Any], codec: Codec | None, *, is_mapped: bool = False
) -> float:
    """One exchange of a whole tensor, compressed or, without a codec, as it is."""
    kind, num_values = each["kind"], each["mebi_values"] * MEBI
    if kind == "send":
        if codec is None:
            return exchanges.send_us(num_values * each["bytes_per_value"])
        sent_us = exchanges.send_us(codec.message_bytes(num_values))
        return codec.encode_us(num_values) + sent_us + codec.decode_us(num_values)
    if codec is None:
        return exchanges.stock_us(kind, num_values * each["bytes_per_value"])
    if is_mapped and kind == "all_reduce":
        return exchanges.mapped_us(num_values, codec)
    return exchanges.compressed_us(kind, num_values, codec)


def _link(content: Mapping[str, Any], codec: Codec, host_us: float) -> Link:
    stock = content["stock_us"]
    # What one of two ranks sends: the whole tensor for an all-reduce, half of it for the others.
    lines = {
        kind: fit_line([(size * MEBI * (1 if kind == "all_reduce" else 0.5), us) for size, us in stock[kind]])
        for kind in ("all_reduce", "reduce_scatter", "all_gather")
    }
    send_recv = fit_line([(1e6 * size, 1e3 * size / rate) for size, rate in content["send_recv_gb_s"]])
    points = content["compressed_us"].get("all_reduce", {}).get(f"int8{MAPPED}")
    return Link(
        **lines,
        send_recv=send_recv,
        contention=tuple(content["contention"]),
        hop_us=tuple(content["hop_us"]),
        mapped=None if points is None else _mapped(points, codec),
        host_us_per_launch=host_us,
    )


def _mapped(points: Sequence[Sequence[float]], codec: Codec) -> Mapped:
    """From all-reduces of two ranks: what is left without adding up is launches, and writing to the peer."""
    left = []
    for size, us, *_ in points:
        num_values = size * MEBI / VALUE_BYTES
        left.append((codec.message_bytes(num_values), us - codec.decode_sum_us(2, num_values)))
    line: Line = fit_line(left)
    if line.wire_us(codec.message_bytes(KERNEL_VALUES)) < codec.encode_us(KERNEL_VALUES):
        raise ValueError("mapped memory was as fast as encoding: its bandwidth cannot be told from these points.")
    return Mapped(line.latency_us, line.us_per_byte)


if __name__ == "__main__":
    main()
