"""What people read: a table on the terminal and ``study.md``."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from lightning_taco.study.figures import Figures, decibels
from lightning_taco.study.results import OVERALL, DirectionResult, SiteResult, StudyResult

COLUMNS = (
    "codec",
    "bits a value",
    "error",
    "dB",
    "median site",
    "worst site",
    "small half",
    "to zero",
    "bias",
    "slope bias",
    "after exchange",
    "encode + decode",
)
TERMINAL_COLUMNS = ("codec", "bits a value", "error", "median site", "worst site", "to zero", "after exchange")
LEGEND = """\
- **bits a value**: on the wire, scales and padding included.
- **error**: relative L2 error of one quantisation, `||x' - x|| / ||x||`, each message weighed by its energy; **dB** is
  20 log10 of it; **median site** and **worst site** are the median and the largest of the sites' errors.
- **small half**: the same over the half of the values of each message with the smallest magnitude; above 100% these
  would arrive better as zeros.
- **to zero**: the part of the values other than zero that becomes zero.
- **bias**: mean of `x' - x` in units of the root mean square of x. **slope bias**: `<x' - x, x> / <x, x>`; -1e-02 is a
  message that arrives 1% too small, which averaging over steps does not mend.
- **after exchange**: relative L2 error of what comes out of the whole exchange, against the exact fp32 result: the sum
  over ranks where there is one, quantised once for two ranks and for a reduce-scatter, twice for an all-reduce over
  more.
- **encode + decode**: median time for the largest message that was observed; baselines have no kernels to time.
- Codecs in **bold** are those that no other codec beats in both bits and error; baselines are not counted among them.
"""
CPU_NOTE = "These times are of a CPU and say nothing about a GPU."
OVERALL_TITLE = "Both directions, with the same weight"


def title(direction: str) -> str:
    """Heading of a direction's table."""
    return OVERALL_TITLE if direction == OVERALL else direction.capitalize()


def rows(result: StudyResult, direction: str) -> list[tuple[str, ...]]:
    """Cells of one direction, a row a candidate, by bits and then by error."""
    found = result.directions[direction]
    times = {candidate.name: candidate.encode_decode_us for candidate in result.candidates}
    names = sorted(found.figures, key=lambda name: _sort_key(found.figures[name]))
    return [_row(name, found, times[name]) for name in names]


def terminal_table(result: StudyResult, direction: str) -> Table:
    """The columns of one direction that fit a terminal; codecs that no other beats are bold."""
    found = result.directions[direction]
    table = Table(title=f"{title(direction)}: {_observed_text(found)}", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in TERMINAL_COLUMNS:
        table.add_column(name, justify="left" if name == "codec" else "right")
    for row in rows(result, direction):
        cells = dict(zip(COLUMNS, row, strict=True))
        style = "bold" if cells["codec"] in found.pareto else None
        table.add_row(*(cells[name] for name in TERMINAL_COLUMNS), style=style)
    return table


def print_study(result: StudyResult, console: Console | None = None) -> None:
    """Print the tables of all directions that were observed, and what was left out."""
    console = console or Console()
    for direction in result.directions:
        if direction != OVERALL:
            console.print(terminal_table(result, direction))
    for line in remarks(result):
        console.print(line, markup=False, highlight=False)


def markdown(result: StudyResult) -> str:
    """``study.md``."""
    parts = [f"# Codecs on the tensor-parallel messages of {result.about['model']}", _about_text(result)]
    parts += ["\n".join(f"- {line}" for line in remarks(result)), LEGEND]
    for direction, found in result.directions.items():
        parts.append(f"## {title(direction)}: {_observed_text(found)}")
        bold = [(f"**{name}**" if name in found.pareto else name, *cells) for name, *cells in rows(result, direction)]
        parts.append(_markdown_table(COLUMNS, bold))
    parts += ["## Sites", SITES_TEXT, _markdown_table(SITE_COLUMNS, [_site_row(site) for site in result.sites])]
    parts += ["## Error by site, of the codecs in bold", _errors_by_site(result)]
    return "\n\n".join(part.strip() for part in parts) + "\n"


SITES_TEXT = """\
**Weight** is a site's part of the energy of its direction. **Cancellation** is `sum_i ||x_i||^2 / ||sum_i x_i||^2` over
the ranks' parts x_i, the same for all codecs: 1 for parts that have nothing to do with each other, more where they
cancel. The error of the sum is about that of the parts times its square root."""
SITE_COLUMNS = ("site", "direction", "exchange", "shape", "messages", "left out", "weight", "cancellation")
LARGE_SHARE = 0.5


def front_lines(result: StudyResult) -> list[str]:
    """For each direction the codecs that no other beats in both bits and error."""
    lines = []
    for direction, found in result.directions.items():
        if direction != OVERALL and found.pareto:
            front = [(name, found.figures[name]) for name in found.pareto]
            codecs = [f"{name}: {it.bits_per_value:.2f} bits, {percent(it.relative_l2_error)}" for name, it in front]
            lines.append(f"{title(direction)}, no codec has both fewer bits and less error than: {'; '.join(codecs)}.")
    return lines


def dominant_site_lines(result: StudyResult) -> list[str]:
    """Sentences about single sites that hold most of a direction's energy, and so decide its figures."""
    return [
        f"{title(site.key.direction)}, {site.place} holds {percent(site.energy_share)} of the energy, and so decides "
        "the figures of all sites together: look at the median site, too."
        for site in result.sites
        if site.energy_share > LARGE_SHARE and result.directions[site.key.direction].num_sites > 1
    ]


def remarks(result: StudyResult) -> list[str]:
    """All sentences that stand beside the tables."""
    return [*front_lines(result), *dominant_site_lines(result), *left_out_lines(result)]


def left_out_lines(result: StudyResult) -> list[str]:
    """Sentences about what the figures do not cover."""
    lines = []
    if result.num_nonfinite:
        sites = ", ".join(f"{site.place} ({site.key.direction})" for site in result.sites if site.num_nonfinite)
        lines.append(f"{_counted(result.num_nonfinite, 'message')} held a NaN or an Inf, left out: {sites}.")
    for reason, count in sorted(result.not_observed.items(), key=lambda item: -item[1]):
        lines.append(f"Not compressed in this run and so not observed: {_counted(count, 'exchange')}, {reason}.")
    return lines


def percent(share: float) -> str:
    """Three significant digits, but not more than four after the point.

    >>> percent(0.02614), percent(1.5), percent(0.0), percent(0.000004), percent(1e-9)
    ('2.61%', '150%', '0%', '0.0004%', '<0.0001%')
    """
    if share == 0 or not math.isfinite(share):
        return f"{share:.0f}%"
    if share < 5e-7:
        return "<0.0001%"
    digits = min(4, max(0, 2 - math.floor(math.log10(100 * share))))
    text = f"{100 * share:.{digits}f}"
    return f"{text.rstrip('0').rstrip('.') if '.' in text else text}%"


def _row(name: str, found: DirectionResult, time_us: float | None) -> tuple[str, ...]:
    figures = found.figures[name]
    return (
        name,
        f"{figures.bits_per_value:.2f}",
        percent(figures.relative_l2_error),
        f"{decibels(figures.relative_l2_error):.1f}",
        percent(found.median[name]),
        percent(found.worst[name].relative_l2_error),
        percent(figures.small_half_error),
        percent(figures.zeroed_share),
        f"{figures.bias:.1e}",
        f"{figures.slope_bias:.1e}",
        percent(figures.exchange_error),
        "-" if time_us is None else f"{time_us:.0f} us",
    )


def _sort_key(figures: Figures) -> tuple[float, float]:
    error = figures.relative_l2_error
    return round(figures.bits_per_value, 2), math.inf if math.isnan(error) else error


def _observed_text(found: DirectionResult) -> str:
    return f"{_counted(found.num_observed, 'message')} of {_counted(found.num_sites, 'site')}"


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _about_text(result: StudyResult) -> str:
    about = result.about
    settings = about["settings"]
    trained = about["trained_with"]
    lines = [
        f"`{about['command']}`",
        "",
        f"- made {about['created']} with " + ", ".join(f"{name} {text}" for name, text in about["versions"].items()),
        f"- {about['device']}, {about['num_ranks']} ranks, {about['tensor_parallel_size']} of them tensor-parallel, "
        f"precision {about['precision']}",
        f"- observed: optimizer steps {about['first_step']} to {about['last_step']} of a training that sent "
        f"forward {trained['forward']}; backward {trained['backward']}",
        f"- timed: {about['timed']}." + (f" {CPU_NOTE}" if about["device"].startswith("cpu") else ""),
        f"- at most {settings['max_messages']} messages of each kind of exchange of a module and direction; "
        + ("built-in candidates" if settings["candidates"] is None else "candidates of the user's own"),
    ]
    return "\n".join(lines)


def _site_row(site: SiteResult) -> tuple[str, ...]:
    return (
        site.place,
        site.key.direction,
        site.key.kind,
        f"{' x '.join(map(str, site.shape))} {site.dtype}",
        f"{site.num_observed} of {site.num_seen}",
        str(site.num_nonfinite),
        percent(site.energy_share),
        "-" if site.cancellation is None else f"{site.cancellation:.3g}",
    )


def _errors_by_site(result: StudyResult) -> str:
    """A row a site that has figures, a column for each codec that no other beats in one direction or both."""
    fronts = [name for direction in result.directions.values() for name in direction.pareto]
    names = list(dict.fromkeys(fronts))
    cells = [
        (site.place, site.key.direction, *(percent(site.figures[name].relative_l2_error) for name in names))
        for site in result.sites
        if site.figures
    ]
    return _markdown_table(("site", "direction", *names), cells)


def _markdown_table(header: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    rule = ["---" if index == 0 else "---:" for index in range(len(header))]
    return "\n".join("| " + " | ".join(row) + " |" for row in [header, rule, *cells])
