"""The plots of the page, as plotly's own JSON: ``{"data": [...], "layout": {...}}``.

Colours of ink, paper and grid are not in it: the page puts them in, by the reader's choice of dark or light. Texts that
come from a log are escaped here, since plotly reads a few HTML tags in them.
"""

from __future__ import annotations

import html
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_taco.report.heat import Heat
from lightning_taco.report.run_data import LoggedEvent
from lightning_taco.report.series import Line, Series, buckets, downsample

# Okabe and Ito's colours, which people with colour blindness tell apart; those that show on white and on black first.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
BASELINE = " (baseline)"
NEUTRAL = "#808080"
DASHES = ("solid", "dash", "dot", "dashdot")
WARNING = "#D55E00"
ACTIONS = {"suspend": ("#D55E00", "x"), "resume": ("#009E73", "circle"), "switch": ("#0072B2", "diamond")}
MAX_EVENT_LINES = 100
MAX_LABEL = 34
ROW_HEIGHT, MIN_HEAT_HEIGHT, MAX_HEAT_HEIGHT = 16, 260, 760

Figure = dict[str, Any]


def line_figure(
    panels: Sequence[tuple[str, Mapping[str, Line]]],
    *,
    events: Sequence[LoggedEvent] = (),
    height: int = 360,
    logarithmic: bool = False,
) -> Figure:
    """Lines over steps, in panels one below the other that share the steps.

    Args:
        panels: the title of the vertical axis, and name to line; the first one is twice as high as the others. A line
            whose name ends in ``(baseline)`` has the colour of the one without, dashed.
        events: each a vertical line.
        height: pixels.
        logarithmic: whether the first panel has a logarithmic axis.
    """
    data: list[Figure] = []
    layout = _layout(height)
    layout["showlegend"] = True
    domains = _domains(len(panels))
    colors: dict[str, int] = {}
    for number, (title, lines) in enumerate(panels, start=1):
        axis = "y" if number == 1 else f"y{number}"
        layout["yaxis" + axis[1:]] = {"title": {"text": title}, "domain": domains[number - 1], "automargin": True}
        for name, line in lines.items():
            index = colors.setdefault(name.removesuffix(BASELINE), len(colors))
            is_new = all(trace["legendgroup"] != html.escape(name) for trace in data)
            for trace in _traces(name, line, index, axis):
                data.append(trace | {"legendgroup": html.escape(name), "showlegend": is_new})
    if logarithmic:
        layout["yaxis"] |= {"type": "log", "exponentformat": "power"}
    layout["xaxis"] |= {"anchor": "y" if len(panels) == 1 else f"y{len(panels)}"}
    layout["shapes"] = event_lines(events)
    return {"data": data, "layout": layout}


def lines_of(series: Mapping[str, Series]) -> dict[str, Line]:
    """Each series, thinned out."""
    return {name: downsample(each) for name, each in series.items()}


def heat_figure(heat: Heat, events: Sequence[LoggedEvent]) -> Figure:
    """The relative errors; the page draws their logarithms, and writes the text of each cell from ``layout.meta``."""
    labels = [html.escape(name) for name in heat.rows]
    rows = list(range(len(labels)))
    height = min(MAX_HEAT_HEIGHT, max(MIN_HEAT_HEIGHT, 110 + ROW_HEIGHT * len(rows)))
    label_every = -(-len(rows) * ROW_HEIGHT // MAX_HEAT_HEIGHT)
    layout = _layout(height)
    layout["yaxis"] = {
        "tickvals": rows[::label_every],
        "ticktext": [html.escape(row_label(name)) for name in heat.rows[::label_every]],
        "autorange": "reversed",
        "automargin": True,
        "showgrid": False,
        "zeroline": False,
        "tickfont": {"size": 11},
    }
    layout["shapes"] = event_lines(events, "#fff")
    layout["showlegend"] = False
    layout["meta"] = {"sites": labels, "columns": [_steps_text(*column) for column in heat.columns]}
    cells = {
        "type": "heatmap",
        "x": heat.middles,
        "y": rows,
        "z": heat.cells,
        "colorscale": "Viridis",
        "hoverongaps": False,
        "hovertemplate": "%{text}<extra></extra>",
        "name": "relative error",
    }
    marks = {
        "type": "scatter",
        "mode": "markers",
        "x": [heat.middles[mark.column] for mark in heat.marks],
        "y": [mark.row for mark in heat.marks],
        "text": [f"{labels[m.row]}<br>{_steps_text(*heat.columns[m.column])}: {m.name}" for m in heat.marks],
        "hovertemplate": "%{text}<extra></extra>",
        "marker": {"symbol": "x", "color": WARNING, "size": 7, "line": {"width": 1, "color": "#fff"}},
        "name": "NaN or Inf",
    }
    return {"data": [cells, marks], "layout": layout}


def event_figure(events: Sequence[LoggedEvent], first_step: float, last_step: float) -> Figure:
    """One row for each source of events, a mark for each event; shape and colour say what was done."""
    sources = list(dict.fromkeys(event.source for event in events))
    layout = _layout(130 + 34 * len(sources))
    margin = max(1.0, 0.02 * (last_step - first_step))
    layout["xaxis"]["range"] = [first_step - margin, last_step + margin]
    layout["yaxis"] = {
        "tickvals": list(range(len(sources))),
        "ticktext": [html.escape(shortened(source)) for source in sources],
        "range": [len(sources) - 0.5, -0.5],
        "automargin": True,
        "zeroline": False,
    }
    layout["hovermode"] = "closest"
    layout["showlegend"] = True
    data = []
    for action in dict.fromkeys(event.action for event in events):
        own = [event for event in events if event.action == action]
        color, symbol = ACTIONS.get(action, (NEUTRAL, "square"))
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": html.escape(action),
                "x": [event.step for event in own],
                "y": [sources.index(event.source) for event in own],
                "text": [_event_text(event) for event in own],
                "hovertemplate": "%{text}<extra></extra>",
                "marker": {"size": 12, "symbol": symbol, "color": color},
            }
        )
    return {"data": data, "layout": layout}


def event_lines(events: Sequence[LoggedEvent], color: str = "") -> list[Figure]:
    """A vertical line for each event; of those that would lie on each other at a page's width, one.

    Args:
        events: in any order.
        color: by default that of the page's ink.
    """
    steps = sorted(event.step for event in events)
    shown = [steps[part.start] for part in buckets(steps, MAX_EVENT_LINES)]
    return [
        {
            "type": "line",
            "x0": step,
            "x1": step,
            "y0": 0,
            "y1": 1,
            "yref": "paper",
            "line": {"width": 1.5, "dash": "dot"} | ({"color": color} if color else {}),
        }
        for step in shown
    ]


def shortened(text: str, limit: int = MAX_LABEL) -> str:
    """The end of a long name, which tells sites apart.

    >>> shortened("abcdef", 4)
    '…def'
    """
    return text if len(text) <= limit else "…" + text[len(text) - limit + 1 :]


def row_label(place: str) -> str:
    """A site's place, short: which direction, and the end of its name.

    >>> row_label("backward/model.up/all_reduce")
    'bwd model.up/all_reduce'
    """
    direction, _, rest = place.partition("/")
    return f"{direction[0]}wd {shortened(rest)}"


def _layout(height: int) -> Figure:
    return {
        "height": height,
        "margin": {"l": 60, "r": 16, "t": 36, "b": 48},
        "xaxis": {"title": {"text": "step"}, "zeroline": False},
        "hovermode": "x unified",
        "legend": {"orientation": "h", "x": 0, "xanchor": "left", "y": 1, "yanchor": "bottom"},
        "uirevision": "kept",  # a live page's reader keeps zoom and hidden lines
    }


def _domains(num_panels: int) -> list[list[float]]:
    """Of equal height but for the first, which has two; from top to bottom, with a gap between."""
    gap, unit = 0.07, 1 / (num_panels + 1)
    domains, top = [], 1.0
    for number in range(num_panels):
        bottom = top - unit * (2 if number == 0 else 1)
        is_last = number == num_panels - 1
        domains.append([0.0 if is_last else bottom + gap / 2, top if number == 0 else top - gap / 2])
        top = bottom
    return domains


def _traces(name: str, line: Line, index: int, axis: str) -> list[Figure]:
    is_baseline = name.endswith(BASELINE)
    color = COLORS[index % len(COLORS)]
    dash = "dash" if is_baseline else DASHES[index // len(COLORS) % len(DASHES)]
    is_sparse = len(line.x) <= 40
    trace: Figure = {
        "type": "scatter",
        "mode": "lines+markers" if is_sparse else "lines",
        "name": html.escape(shortened(name, 60)),
        "x": line.x,
        "y": line.y,
        "yaxis": axis,
        "line": {"color": color, "width": 1.5, "dash": dash},
        "opacity": 0.75 if is_baseline else 1,
        "hovertemplate": "%{y}",
    }
    if is_sparse:
        trace["marker"] = {"size": 5}
    return [trace, *_marks(name, line, axis)]


def _marks(name: str, line: Line, axis: str) -> list[Figure]:
    """Crosses where values were not finite, at the height of the value before or else after them."""
    if not line.marks:
        return []
    finite = [value for value in line.y if value is not None]
    heights, last = [], finite[0] if finite else 0
    for value in line.y:
        if value is None:
            heights.append(last)
        else:
            last = value
    trace: Figure = {
        "type": "scatter",
        "mode": "markers",
        "name": f"{html.escape(shortened(name, 60))}: NaN or Inf",
        "x": [mark.step for mark in line.marks],
        "y": heights,
        "yaxis": axis,
        "text": [mark.name for mark in line.marks],
        "hovertemplate": "%{text}",
        "marker": {"symbol": "x", "color": WARNING, "size": 9},
    }
    return [trace]


def _steps_text(first: float, last: float) -> str:
    return f"step {first:,.15g}" if first == last else f"steps {first:,.15g} to {last:,.15g}"


def _event_text(event: LoggedEvent) -> str:
    lines = textwrap.wrap(event.reason, 60) or [""]
    site = html.escape(shortened(event.site, 60)) or "all sites"
    head = f"step {event.step:,.15g}: {html.escape(event.action)} {site}"
    return "<br>".join([head, *(html.escape(line) for line in lines)])
