"""``frontier.html`` and ``frontier.svg``: error against bits, a panel for each direction."""

from __future__ import annotations

import html
import math
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lightning_taco.study.candidates import FAMILIES, Family
from lightning_taco.study.figures import decibels
from lightning_taco.study.results import OVERALL, DirectionResult, StudyResult, pareto_front
from lightning_taco.study.tables import percent, title

# Okabe and Ito's colours, which people with colour blindness tell apart; a shape each, for those who see none.
STYLES: dict[Family, tuple[str, str]] = {
    "integer, rotated": ("#0072B2", "circle"),
    "integer, Gaussian levels": ("#009E73", "diamond"),
    "integer, not rotated": ("#56B4E9", "circle-open"),
    "FP8": ("#E69F00", "square"),
    "baseline": ("#D55E00", "x"),
}
NEUTRAL = "#808080"  # readable on white and on near-black
LIGHT_GRID = "#e3e3e3"
MARKER_SIZE = 10
WIDTH, HEIGHT = 1200, 620
ALL_MESSAGES, MEDIAN_SITE, WORST_SITE = MEASURES = ("all messages", "median site", "worst site")
INSTALL_SENTENCE = (
    "frontier.html and frontier.svg are missing, since plotly is not installed; pip install 'lightning-taco[study]'."
)
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; --ink: #222; --paper: #fff; }}
@media (prefers-color-scheme: dark) {{ :root {{ --ink: #ddd; --paper: #161616; }} }}
body {{ margin: 1.5rem; color: var(--ink); background: var(--paper); font: 15px/1.45 system-ui, sans-serif; }}
h1 {{ font-size: 1.2rem; }}
p {{ max-width: 75ch; }}
</style>
</head>
<body>
<h1>{title}</h1>
<p>{text}</p>
{plot}
</body>
</html>
"""
TEXT = (
    "Relative L2 error of one quantisation against bits on the wire: lower left is better. The dashed line joins the "
    "codecs that no other codec beats in both; baselines can be compared with it, but not be chosen for a run. The "
    "buttons choose the error: of all messages, each weighed by its energy, or of the median or the worst site. Hover "
    "over a point for all its figures; click a family in the legend to hide it."
)
# The page's colours follow the reader's setting; so must the ink of the plot.
FOLLOW_COLOR_SCHEME = """
const dark = window.matchMedia('(prefers-color-scheme: dark)');
function paint() {
  const plot = document.getElementById('{plot_id}');
  const ink = dark.matches ? '#ddd' : '#222', grid = dark.matches ? '#3a3a3a' : '#e3e3e3';
  const change = {'font.color': ink};
  for (const axis of Object.keys(plot.layout).filter(name => /^[xy]axis/.test(name))) {
    change[axis + '.gridcolor'] = grid;
  }
  Plotly.relayout(plot, change);
}
dark.addEventListener('change', paint);
paint();
"""


def has_plotly() -> bool:
    """Whether plotly, an optional dependency, can be imported."""
    return find_spec("plotly") is not None


def write_frontier(result: StudyResult, folder: Path) -> list[str]:
    """Write the plot to `folder`; returns a sentence for each file that could not be made."""
    if not has_plotly():
        return [INSTALL_SENTENCE]
    figure = frontier_figure(result)
    (folder / "frontier.html").write_text(frontier_page(result, figure), encoding="utf-8")
    return _write_svg(figure, folder / "frontier.svg")


def _write_svg(figure: Any, path: Path) -> list[str]:
    if find_spec("kaleido") is None:
        return [f"{path.name} is missing, since kaleido is not installed; pip install kaleido, which needs Chrome too."]
    try:
        figure.write_image(path, width=WIDTH, height=HEIGHT)
    except Exception as error:  # kaleido raises what it likes: for a version, without Chrome, in a sandbox
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        return [f"{path.name} is missing, since kaleido could not draw it ({reason}); frontier.html shows the same."]
    return []


def frontier_page(result: StudyResult, figure: Any) -> str:
    """The plot as a page of its own, plotly's script included."""
    plot = figure.to_html(
        full_html=False,
        include_plotlyjs=True,
        default_height=f"{HEIGHT}px",
        post_script=FOLLOW_COLOR_SCHEME,
        config={"responsive": True, "displaylogo": False},
    )
    heading = f"Codecs on the tensor-parallel messages of {result.about['model']}"
    return PAGE.format(title=html.escape(heading), text=html.escape(TEXT), plot=plot)


def frontier_figure(result: StudyResult) -> Any:
    """A plotly figure with a panel for each direction that was observed."""
    from plotly.subplots import make_subplots

    directions = [direction for direction in result.directions if direction != OVERALL]
    figure = make_subplots(
        rows=1,
        cols=max(1, len(directions)),
        subplot_titles=[title(direction) for direction in directions],
        shared_yaxes=True,
        horizontal_spacing=0.03,
    )
    for column, direction in enumerate(directions, start=1):
        for trace in _traces(result, direction, is_first=column == 1):
            figure.add_trace(trace, row=1, col=column)
    figure.update_xaxes(title="bits a value on the wire", dtick=1, gridcolor=LIGHT_GRID, zeroline=False)
    figure.update_yaxes(gridcolor=LIGHT_GRID, zeroline=False)
    figure.update_yaxes(title="relative L2 error, dB", col=1)
    figure.update_layout(
        template="none",
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"color": NEUTRAL, "size": 13},
        legend={"orientation": "h", "y": -0.14, "x": 0.5, "xanchor": "center"},
        margin={"l": 70, "r": 20, "t": 80, "b": 90},
        hoverlabel={"align": "left"},
        updatemenus=[_buttons(result, directions)],
    )
    return figure


def _buttons(result: StudyResult, directions: list[str]) -> dict[str, Any]:
    """A button for each measure, which moves the points and the Pareto lines. Dark on light, whatever the page is."""
    buttons = []
    for measure in MEASURES:
        lines = [_lines(result, direction, measure) for direction in directions]
        moved = {"x": [x for line in lines for x, _ in line], "y": [y for line in lines for _, y in line]}
        buttons.append({"label": measure, "method": "restyle", "args": [moved]})
    return {
        "type": "buttons",
        "direction": "right",
        "buttons": buttons,
        "showactive": True,
        "x": 0.0,
        "xanchor": "left",
        "y": 1.08,
        "yanchor": "bottom",
        "font": {"color": "#222", "size": 12},
        "bgcolor": "#eee",
    }


def _lines(result: StudyResult, direction: str, measure: str) -> list[tuple[list[float], list[float | None]]]:
    """x and y of every trace of a direction: the Pareto line, then the points of each family."""
    found = result.directions[direction]
    errors = _errors(found, measure)
    codecs = [candidate.name for candidate in result.candidates if candidate.config is not None]
    front = pareto_front({name: (found.figures[name].bits_per_value, errors[name]) for name in codecs})
    groups = [list(front), *_families(result).values()]
    return [
        ([found.figures[name].bits_per_value for name in names], [_height(errors[name]) for name in names])
        for names in groups
    ]


def _errors(found: DirectionResult, measure: str) -> dict[str, float]:
    if measure == MEDIAN_SITE:
        return found.median
    if measure == WORST_SITE:
        return {name: worst.relative_l2_error for name, worst in found.worst.items()}
    return {name: figures.relative_l2_error for name, figures in found.figures.items()}


def _families(result: StudyResult) -> dict[Family, list[str]]:
    """The names of the candidates of each family that has any."""
    names = {
        family: [candidate.name for candidate in result.candidates if candidate.family == family] for family in FAMILIES
    }
    return {family: members for family, members in names.items() if members}


def _traces(result: StudyResult, direction: str, *, is_first: bool) -> list[Any]:
    """The Pareto line, and the points of each family."""
    import plotly.graph_objects as go

    (front_x, front_y), *points = _lines(result, direction, ALL_MESSAGES)
    traces = [
        go.Scatter(
            x=front_x,
            y=front_y,
            mode="lines",
            line={"color": NEUTRAL, "dash": "dash", "width": 1.5},
            name="no codec beats these",
            legendgroup="front",
            showlegend=is_first,
            hoverinfo="skip",
        )
    ]
    for (family, names), (x, y) in zip(_families(result).items(), points, strict=True):
        color, symbol = STYLES[family]
        traces.append(
            go.Scatter(
                x=x,
                y=y,
                text=[_hover(result, direction, name) for name in names],
                mode="markers",
                marker={"color": color, "symbol": symbol, "size": MARKER_SIZE, "line": {"color": color, "width": 2}},
                name=family,
                legendgroup=family,
                showlegend=is_first,
                hovertemplate="%{text}<extra></extra>",
            )
        )
    return traces


def _height(error: float) -> float | None:
    """dB; ``None``, which plotly leaves out, where there is none."""
    height = decibels(error)
    return height if math.isfinite(height) else None


def _hover(result: StudyResult, direction: str, name: str) -> str:
    found = result.directions[direction]
    figures, worst = found.figures[name], found.worst[name]
    (time_us,) = (each.encode_decode_us for each in result.candidates if each.name == name)
    lines = [
        f"<b>{html.escape(name)}</b>",
        f"{figures.bits_per_value:.3f} bits a value",
        f"error {percent(figures.relative_l2_error)} ({decibels(figures.relative_l2_error):.1f} dB)",
        f"median site {percent(found.median[name])}",
        f"worst site {percent(worst.relative_l2_error)}: {html.escape(worst.place)}, {worst.kind}",
        f"small half {percent(figures.small_half_error)}",
        f"to zero {percent(figures.zeroed_share)}",
        f"bias {figures.bias:.1e} rms, slope {figures.slope_bias:.1e}",
        f"after exchange {percent(figures.exchange_error)}",
    ]
    if time_us is not None:
        lines.append(f"encode + decode {time_us:.0f} us")
    return "<br>".join(lines)
