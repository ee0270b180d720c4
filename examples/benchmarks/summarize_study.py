"""A short table and a plot for print of a study: `python -m examples.benchmarks.summarize_study study.json`.

`lightning-taco study` writes everything; this is what a results file quotes.
"""

import argparse
import json
import math
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

# Okabe and Ito's colours, which colour-blind people can tell apart, and shapes that tell them apart in print.
STYLES = {
    "integer, rotated": ("#0072B2", "circle"),
    "integer, Gaussian levels": ("#D55E00", "star"),
    "integer, not rotated": ("#56B4E9", "circle-open"),
    "FP8": ("#009E73", "square"),
    "baseline": ("#7F7F7F", "x"),
}
LOWEST_DECIBELS = -48


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--plot", type=Path, help="write the plot here, as SVG (needs kaleido) or HTML")
    arguments = parser.parse_args()
    study = json.loads(arguments.file.read_text())
    print(table(study))
    if arguments.plot:
        figure = plot(study)
        figure.write_html(arguments.plot) if arguments.plot.suffix == ".html" else figure.write_image(arguments.plot)


def table(study: dict[str, Any]) -> str:
    """Markdown: a row a candidate, by bits."""
    lines = [
        "| codec | bits | error, forward | backward | small half, forward | to zero, backward "
        "| after exchange, forward | encode + decode |",
        "|---|---|---|---|---|---|---|---|",
    ]
    forward, backward = (study["directions"][name]["codecs"] for name in ("forward", "backward"))
    for candidate in sorted(study["candidates"], key=lambda each: forward[each["name"]]["bits_per_value"]):
        name, time = candidate["name"], candidate["encode_decode_us"]
        there, back = forward[name], backward[name]
        cells = [
            name,
            f"{there['bits_per_value']:.2f}",
            _percent(there["relative_l2_error"]),
            _percent(back["relative_l2_error"]),
            _percent(there["small_half_error"]),
            _percent(back["zeroed_share"]),
            _percent(there["exchange_error"]),
            "-" if time is None else f"{time:.0f} us",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def plot(study: dict[str, Any]) -> go.Figure:
    """Error in dB against bits, a panel for each direction."""
    figure = make_subplots(rows=1, cols=2, subplot_titles=["forward", "backward"], shared_yaxes=True)
    for column, direction in enumerate(("forward", "backward"), start=1):
        codecs = study["directions"][direction]["codecs"]
        for family, (colour, symbol) in STYLES.items():
            names = [each["name"] for each in study["candidates"] if each["family"] == family]
            figure.add_scatter(
                x=[codecs[name]["bits_per_value"] for name in names],
                y=[20 * math.log10(codecs[name]["relative_l2_error"]) for name in names],
                mode="markers",
                marker={"color": colour, "symbol": symbol, "size": 10},
                name=family,
                showlegend=column == 1,
                row=1,
                col=column,
            )
    figure.update_xaxes(title="bits of a value on the wire", dtick=1)
    figure.update_yaxes(range=[LOWEST_DECIBELS, 2])
    figure.update_yaxes(title="relative L2 error, dB", col=1)
    figure.update_layout(template="plotly_white", width=1000, height=520, legend={"orientation": "h", "y": -0.2})
    return figure


def _percent(share: float) -> str:
    return f"{100 * share:.3g}%"


if __name__ == "__main__":
    main()
