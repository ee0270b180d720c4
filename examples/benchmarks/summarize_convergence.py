"""The table and the plot of a convergence study: `python -m examples.benchmarks.summarize_convergence FILE.json ...`.

Gaps are in percent of the uncompressed branch of the same file, paired by batch: training loss over the later two
thirds of the branch, with its standard error; validation loss with the codec on, and of the same weights with it off.
"""

import argparse
import json
import math
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

import plotly.graph_objects as go

BASELINE = "none"
UNCOMPRESSED_BITS = 16
COLOUR = "#0072B2"


class Row(NamedTuple):
    """One branch; gaps in percent."""

    name: str
    forward_bits: float
    backward_bits: float
    train_gap: float
    standard_error: float
    validation_gap: float
    weights_gap: float

    @property
    def mean_bits(self) -> float:
        return (self.forward_bits + self.backward_bits) / 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument(
        "--plot", type=Path, help="write the plot of the first file here, as SVG (needs kaleido) or HTML"
    )
    arguments = parser.parse_args()
    for path in arguments.files:
        content = json.loads(path.read_text())
        print(f"\n{path.name}\n")
        print(table(rows_of(content["branches"])))
    if arguments.plot:
        figure = plot(rows_of(json.loads(arguments.files[0].read_text())["branches"]))
        figure.write_html(arguments.plot) if arguments.plot.suffix == ".html" else figure.write_image(arguments.plot)


def rows_of(branches: dict[str, dict[str, Any]]) -> list[Row]:
    """All branches that ended, in their order; a run from scratch stands beside the uncompressed one of its seed."""
    ended = {name: result for name, result in branches.items() if "error" not in result}
    return [row_of(name, result, ended[baseline_of(name)]) for name, result in ended.items()]


def baseline_of(name: str) -> str:
    """``"none"``, and of ``"int8~1"`` ``"none~1"``."""
    seed = name.partition("~")[2]
    return f"{BASELINE}~{seed}" if seed else BASELINE


def row_of(name: str, result: dict[str, Any], base: dict[str, Any]) -> Row:
    first = len(base["train_loss"]) // 3
    reference = base["train_loss"][first:]
    differences = [loss - other for loss, other in zip(result["train_loss"][first:], reference, strict=True)]
    scale = 100 / mean(reference)
    return Row(
        name=name,
        forward_bits=result["bits"][0],
        backward_bits=result["bits"][1],
        train_gap=scale * mean(differences),
        standard_error=scale * stdev(differences) / math.sqrt(len(differences)),
        validation_gap=100 * (result["validation_on"] / base["validation_on"] - 1),
        weights_gap=100 * (result["validation_off"] / base["validation_off"] - 1),
    )


def table(rows: list[Row]) -> str:
    """Markdown."""
    lines = [
        "| forward / backward | bits | mean | training, paired (standard error) | validation, codec on | codec off |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row.name} | {row.forward_bits:g} / {row.backward_bits:g} | {row.mean_bits:g} | "
            f"{row.train_gap:+.3f}% ({row.standard_error:.3f}) | {row.validation_gap:+.3f}% | {row.weights_gap:+.3f}% |"
        )
    return "\n".join(lines)


def plot(rows: list[Row]) -> go.Figure:
    """Gap in training loss, with its standard error, against mean bits; the second uncompressed run is the noise."""
    noise = [row for row in rows if row.mean_bits == UNCOMPRESSED_BITS and row.name != baseline_of(row.name)]
    rows = [row for row in rows if row.mean_bits < UNCOMPRESSED_BITS]
    figure = go.Figure()
    figure.add_scatter(
        x=[row.mean_bits for row in rows],
        y=[row.train_gap for row in rows],
        error_y={"array": [row.standard_error for row in rows], "thickness": 1},
        text=[row.name for row in rows],
        mode="markers+text",
        textposition=["middle right" if place % 2 else "middle left" for place in range(len(rows))],
        marker={"size": 8, "color": COLOUR},
    )
    figure.update_layout(
        template="plotly_white",
        width=1000,
        height=600,
        font={"size": 11},
        showlegend=False,
        xaxis={"title": "mean bits of a value on the wire, forward and backward", "range": [3.7, 9.2]},
        yaxis_title="training loss against the uncompressed branch, paired by batch, percent",
    )
    figure.add_hline(y=0, line_color="gray")
    for row in noise:
        figure.add_hline(y=row.train_gap, line_color="gray", line_dash="dot", annotation_text="uncompressed again")
    return figure


if __name__ == "__main__":
    main()
