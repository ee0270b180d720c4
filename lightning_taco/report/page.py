"""The page: one file with everything in it, and nothing that it would have to fetch.

A content security policy allows the page's own scripts only, by a number that is new with each page; so even a text of
a log that got past the escaping would not run.
"""

from __future__ import annotations

import html
import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from string import Template
from typing import Any

import lightning_taco

INSTALL_SENTENCE = "The report needs plotly, which is not installed; pip install 'lightning-taco[report]'."
FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Section:
    """One part of the page.

    Attributes:
        name: of the section, of its plot and of its table.
        title: heading.
        short: in the list of sections.
        text: below the heading; plain.
        empty: instead of the plot, where there are no numbers for it; a section without it is hidden then.
        has_plot: whether it has a plot.
        table: the label of its table; ``""`` for none.
    """

    name: str
    title: str
    short: str
    text: str
    empty: str = ""
    has_plot: bool = True
    table: str = ""


SECTIONS = (
    Section(
        "loss",
        "Loss",
        "Loss",
        "Training and validation; dashed is the baseline, and the gap is how far the run lies above it. "
        "A dotted line marks an event, a cross a NaN or an infinite value.",
        "No loss was logged: log one whose name holds “loss” with self.log.",
    ),
    Section(
        "error",
        "Relative error by site and step",
        "Error",
        "One row a site, in the order of the model, forward first. The colour is the largest relative reconstruction "
        "error ||x' - x|| / ||x|| of the cell's steps, on a logarithmic scale. A cross is a NaN or an infinite value; "
        "a gap is a step at which the site was not measured, such as while it is sent as it is.",
        "No error was measured: add lightning_taco.callbacks.CompressionMonitor to trainer.callbacks.",
    ),
    Section(
        "events",
        "Events",
        "Events",
        "What guard and schedule did to the compression, and where the run was resumed.",
        "Nothing happened: no guard or schedule acted, and the run was not resumed.",
        table="Events",
    ),
    Section(
        "sites",
        "Sites",
        "Sites",
        "The largest last error first; a heading sorts by its column.",
        "No site was measured: add lightning_taco.callbacks.CompressionMonitor to trainer.callbacks.",
        has_plot=False,
        table="Sites",
    ),
    Section(
        "gradients",
        "Gradient norms",
        "Gradients",
        "Of the unsharded model; clipped is the norm with which the optimizer steps.",
        "No norm was logged: add lightning_taco.callbacks.GradientNormMonitor to trainer.callbacks.",
    ),
    Section(
        "bytes",
        "Compression ratio and bytes",
        "Bytes",
        "Bytes that would have been sent over bytes sent, of all exchanges so far, those that are not compressed "
        "included.",
        "No bytes were logged: add lightning_taco.callbacks.CompressionMonitor to trainer.callbacks.",
    ),
    Section(
        "time",
        "Step time",
        "Time",
        "The sampled steps, and what they are made of.",
    ),
    Section(
        "break_even",
        "Break-even",
        "Break-even",
        "Where compression starts to pay, as measured for this run.",
        has_plot=False,
        table="Break-even",
    ),
)


def has_plotly() -> bool:
    """Whether plotly, an optional dependency, can be imported."""
    return find_spec("plotly") is not None


def page_of(content: Mapping[str, Any]) -> str:
    """The page.

    Args:
        content: as `Report.content` makes it; with ``poll_seconds`` the page asks its server for news that often.
    """
    nonce = secrets.token_urlsafe(16)
    fields = {
        "title": html.escape(str(content["title"])),
        "version": html.escape(lightning_taco.__version__),
        "policy": policy(nonce),
        "nonce": nonce,
        "style": _file("page.css"),
        "script": _file("page.js"),
        "sections": "\n".join([*(_section(section) for section in SECTIONS), _file("sections.html")]),
        "content": embedded(content),
        "plotly": _plotly_script(),
    }
    return Template(_file("page.html")).substitute(fields)


def policy(nonce: str) -> str:
    """What the page may do: its own scripts and styles, and asking its own server."""
    return (
        f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'unsafe-inline'; img-src data: blob:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'"
    )


def as_json(content: Mapping[str, Any]) -> str:
    """Short JSON; a value that JSON cannot hold is an error here and not in the browser."""
    return json.dumps(content, allow_nan=False, separators=(",", ":"))


def embedded(content: Mapping[str, Any]) -> str:
    """JSON that can stand in a ``<script>``: no text of it can end the element or begin a comment.

    >>> embedded({"a": "</script><!--"})
    '{"a":"\\\\u003c/script\\\\u003e\\\\u003c!--"}'
    """
    return as_json(content).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _section(section: Section) -> str:
    name, title = section.name, html.escape(section.title)
    parts = [
        f'<section id="{name}" data-short="{html.escape(section.short)}" aria-labelledby="head-{name}">',
        f'<h2 id="head-{name}">{title}</h2>',
        f'<p class="subtle">{html.escape(section.text)}</p>',
    ]
    if section.has_plot:
        if section.empty:
            parts.append(f'<p class="empty" hidden>{html.escape(section.empty)}</p>')
        parts.append(f'<div id="plot-{name}" class="plot" role="group" aria-label="Plot: {title}" hidden></div>')
    if section.table:
        parts.append(_table(name, section.table))
    if section.empty and not section.has_plot:
        parts.append(f'<p class="without-table">{html.escape(section.empty)}</p>')
    return "\n".join([*parts, "</section>"])


def _table(name: str, label: str) -> str:
    label = html.escape(label)
    return (
        f'<div id="block-{name}" hidden>\n<div class="controls"><label for="search-{name}">Search</label>'
        f'<input id="search-{name}" type="search" autocomplete="off" aria-controls="table-{name}">'
        f'<span id="count-{name}" class="subtle" role="status"></span></div>\n'
        f'<div id="table-{name}" class="table" role="region" aria-label="{label}" tabindex="0"></div>\n</div>'
    )


@cache
def _file(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


@cache
def _plotly_script() -> str:
    from plotly.offline import get_plotlyjs

    return get_plotlyjs().replace("</script", "<\\/script")
