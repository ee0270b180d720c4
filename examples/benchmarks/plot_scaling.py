"""The plot of `predict_scaling`: speed-up against the tensor-parallel degree, predicted bands and measured points."""

from collections.abc import Sequence

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from examples.benchmarks.predict_scaling import ALL_REDUCE, RANKS, STEP, Prediction

# Okabe and Ito's colours, which colour-blind people can tell apart, and shapes that tell them apart in print.
STYLES = {
    "int8": ("#0072B2", "circle"),
    "int8, mapped": ("#CC79A7", "diamond"),
    "int6g": ("#D55E00", "square"),
    "int4gs": ("#009E73", "triangle-up"),
    "balanced": ("#E69F00", "star"),
}
OPACITY = 0.15


def plot(predictions: Sequence[Prediction]) -> go.Figure:
    """A column for each link, a row each for the all-reduce and the step; a codec without a style is left out."""
    links = list(dict.fromkeys(each.link for each in predictions))
    titles = [f"{what}, {link}" for what in (ALL_REDUCE, STEP) for link in links]
    figure = make_subplots(rows=2, cols=len(links), subplot_titles=titles, shared_yaxes="rows", vertical_spacing=0.12)
    seen: set[str] = set()
    for row, what in enumerate((ALL_REDUCE, STEP), start=1):
        for column, link in enumerate(links, start=1):
            for codec in STYLES:
                line = [each for each in predictions if each.key[:3] == (what, codec, link)]
                if line:
                    for trace in _traces(line, codec, is_first=codec not in seen):
                        figure.add_trace(trace, row=row, col=column)
                    seen.add(codec)
            figure.add_hline(y=1, line_color="gray", line_dash="dot", row=row, col=column)
    figure.update_xaxes(type="log", tickvals=list(RANKS), range=[0.2, 1.0], title="tensor-parallel ranks")
    figure.update_yaxes(title="speed-up", col=1)
    figure.update_layout(
        template="plotly_white",
        width=1100,
        height=800,
        title="Predicted from two GPUs (line and band: middle and corners of the assumptions); markers: measured",
        legend={"orientation": "h", "y": -0.12},
    )
    return figure


def _traces(line: list[Prediction], codec: str, *, is_first: bool) -> list[go.Scatter]:
    colour, symbol = STYLES[codec]
    ranks = [each.num_ranks for each in line]
    band = go.Scatter(
        x=[*ranks, *reversed(ranks)],
        y=[*(each.high for each in line), *(each.low for each in reversed(line))],
        mode="lines",
        fill="toself",
        fillcolor=colour,
        opacity=OPACITY,
        line={"width": 0},
        hoverinfo="skip",
        showlegend=False,
        legendgroup=codec,
    )
    middle = go.Scatter(
        x=ranks,
        y=[each.speedup for each in line],
        mode="lines",
        line={"color": colour},
        name=codec,
        showlegend=is_first,
        legendgroup=codec,
    )
    measured = [each for each in line if each.measured is not None]
    points = go.Scatter(
        x=[each.num_ranks for each in measured],
        y=[each.measured for each in measured],
        mode="markers",
        marker={"color": colour, "symbol": symbol, "size": 11, "line": {"color": "black", "width": 1}},
        name=f"{codec}, measured",
        showlegend=False,
        legendgroup=codec,
    )
    return [band, middle, *([points] if measured else [])]
