"""A page with a plot of the speed-ups, one panel for each kind of exchange."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from lightning_taco.collectives.algorithms import MEASURED_KINDS
from lightning_taco.collectives.break_even import BreakEven

INSTALL_SENTENCE = "--plot needs plotly; install it with: pip install 'lightning-taco[report]'"


def has_plotly() -> bool:
    """Whether plotly can be imported."""
    return importlib.util.find_spec("plotly") is not None


def save(break_even: BreakEven, path: Path) -> None:
    """Write the page; it needs nothing from the network.

    Raises:
        OSError: when it cannot be written.
    """
    from plotly.graph_objects import Scatter
    from plotly.subplots import make_subplots

    lines = speed_ups(break_even)
    kinds: list[str] = [kind for kind in MEASURED_KINDS if any(key[0] == kind for key in lines)]
    figure = make_subplots(rows=len(kinds), cols=1, shared_xaxes=True, subplot_titles=kinds)
    for (kind, codec), points in lines.items():
        sizes, gains = zip(*points, strict=True)
        figure.add_trace(Scatter(x=sizes, y=gains, name=codec, mode="lines+markers"), kinds.index(kind) + 1, 1)
    figure.add_hline(y=1, line_dash="dash")
    figure.update_xaxes(type="log", title="bytes")
    figure.update_yaxes(title="speed-up")
    figure.update_layout(height=320 * len(kinds) + 80)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.write_html(path, include_plotlyjs=True)


def speed_ups(break_even: BreakEven) -> dict[tuple[str, str], list[tuple[int, float]]]:
    """By kind and codec: sizes, and the speed-up of the fastest algorithm."""
    found: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for timing in break_even.timings:
        gain = timing.stock_us / min(timing.algorithm_us.values())
        found.setdefault((timing.kind, timing.codec), []).append((timing.num_bytes, gain))
    return found
