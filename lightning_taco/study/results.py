"""The outcome of a study: figures by site and by direction, and what goes into ``study.json``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from lightning_taco.dtensor.errors import ErrorKey
from lightning_taco.study.candidates import Candidate, CodecCandidate, Family
from lightning_taco.study.figures import (
    CodecSums,
    Figures,
    MessageSums,
    cancellation,
    decibels,
    figures_of,
    overall,
    ratio,
)
from lightning_taco.study.recorder import SiteSums

OVERALL = "overall"
DIRECTIONS = ("forward", "backward")
FORMAT = 1
"""Of ``study.json``; raised when a key changes its meaning."""


@dataclass(frozen=True)
class CandidateResult:
    """One candidate: what it is called, what it is, and how long one encode and decode take."""

    name: str
    family: Family
    config: dict[str, Any] | None
    """The fields of its `CodecConfig`; ``None`` for a baseline."""
    encode_decode_us: float | None
    """``None`` for a baseline, which has no kernels."""


@dataclass(frozen=True)
class SiteResult:
    """One kind of exchange of one module in one direction; figures by the name of the candidate."""

    key: ErrorKey
    shape: tuple[int, ...]
    dtype: str
    num_seen: int
    num_observed: int
    num_nonfinite: int
    energy_share: float
    """Its part of the energy of its direction, and so its weight there."""
    cancellation: float | None
    figures: dict[str, Figures]

    @property
    def place(self) -> str:
        """Module path, for people."""
        return self.key.site or "(outside any module)"


@dataclass(frozen=True)
class WorstSite:
    """The site at which a candidate's relative L2 error is largest."""

    place: str
    direction: str
    kind: str
    relative_l2_error: float


@dataclass(frozen=True)
class DirectionResult:
    """All sites of one direction, or both directions with the same weight."""

    num_sites: int
    num_observed: int
    figures: dict[str, Figures]
    worst: dict[str, WorstSite]
    median: dict[str, float]
    """The median of the sites' relative L2 errors: what is usual, where one site holds most of the energy."""
    pareto: tuple[str, ...]
    """The codecs, baselines left out, that no other one beats in both bits and relative L2 error; by bits."""


@dataclass(frozen=True)
class StudyResult:
    """Everything that a study found.

    Attributes:
        about: how it was made: command, versions, device, settings; JSON values.
        candidates: what was compared.
        sites: by site, kind and direction.
        directions: by ``"forward"``, ``"backward"`` (each only if it had a finite message) and ``"overall"``.
        not_observed: reason to the number of exchanges of the whole run that were not compressed and so not observed.
    """

    about: dict[str, Any]
    candidates: tuple[CandidateResult, ...]
    sites: tuple[SiteResult, ...]
    directions: dict[str, DirectionResult]
    not_observed: dict[str, int]

    @property
    def num_nonfinite(self) -> int:
        """Messages that were left out."""
        return sum(site.num_nonfinite for site in self.sites)

    def as_json(self) -> dict[str, Any]:
        """Plain values; what is not finite is ``None``."""
        return {
            "format": FORMAT,
            "about": self.about,
            "candidates": [asdict(candidate) for candidate in self.candidates],
            "directions": {name: _direction_json(direction) for name, direction in self.directions.items()},
            "sites": [_site_json(site) for site in self.sites],
            "not_observed": self.not_observed,
        }


def study_result(
    sums: Sequence[SiteSums],
    candidates: Sequence[Candidate],
    times_us: Mapping[str, float],
    about: dict[str, Any],
    not_observed: dict[str, int],
) -> StudyResult:
    """Turn sums into figures.

    Args:
        sums: of each site, as `MessageRecorder.read` gives them.
        candidates: in the order of the sums.
        times_us: of one encode and decode, by name; baselines have none.
        about: as in `StudyResult`.
        not_observed: as in `StudyResult`.
    """
    names = [candidate.name for candidate in candidates]
    codecs = {candidate.name for candidate in candidates if isinstance(candidate, CodecCandidate)}
    energies = {name: sum(each.messages.energy for each in sums if each.key.direction == name) for name in DIRECTIONS}
    sites = tuple(_site_result(each, names, energies[each.key.direction]) for each in sums)
    directions = {}
    for direction in DIRECTIONS:
        own = [each for each in sums if each.key.direction == direction and each.messages.num_finite]
        if own:
            found = _summed_figures(own, names)
            directions[direction] = _direction_result(found, _of(sites, direction), codecs)
    if directions:
        both = {name: overall([each.figures[name] for each in directions.values()]) for name in names}
        directions[OVERALL] = _direction_result(both, list(sites), codecs)
    return StudyResult(
        about=about,
        candidates=tuple(_candidate_result(candidate, times_us) for candidate in candidates),
        sites=sites,
        directions=directions,
        not_observed=not_observed,
    )


def pareto_front(points: Mapping[str, tuple[float, float]]) -> tuple[str, ...]:
    """The names of those (cost, error) that no other point beats in both, by cost; of equal ones the first.

    Errors that are no numbers or infinite are on no front.

    >>> pareto_front({"a": (8, 1.0), "b": (4, 9.0), "c": (8, 2.0), "d": (6, 9.0)})
    ('b', 'a')
    """
    front: list[str] = []
    best = math.inf
    for name in sorted((name for name in points if math.isfinite(points[name][1])), key=lambda name: points[name]):
        error = points[name][1]
        if error < best:
            best = error
            front.append(name)
    return tuple(front)


def _candidate_result(candidate: Candidate, times_us: Mapping[str, float]) -> CandidateResult:
    config = asdict(candidate.codec) if isinstance(candidate, CodecCandidate) else None
    return CandidateResult(candidate.name, candidate.family, config, times_us.get(candidate.name))


def _site_result(sums: SiteSums, names: Sequence[str], direction_energy: float) -> SiteResult:
    is_empty = not sums.messages.num_finite
    return SiteResult(
        key=sums.key,
        shape=sums.shape,
        dtype=str(sums.dtype).removeprefix("torch."),
        num_seen=sums.num_seen,
        num_observed=round(sums.messages.num_finite),
        num_nonfinite=round(sums.messages.num_nonfinite),
        energy_share=ratio(sums.messages.energy, direction_energy),
        cancellation=None if is_empty else cancellation(sums.messages),
        figures={} if is_empty else _summed_figures([sums], names),
    )


def _summed_figures(sums: Sequence[SiteSums], names: Sequence[str]) -> dict[str, Figures]:
    messages = MessageSums(*_added(each.messages for each in sums))
    return {
        name: figures_of(messages, CodecSums(*_added(each.codecs[index] for each in sums)))
        for index, name in enumerate(names)
    }


def _added(vectors: Iterable[Sequence[float]]) -> list[float]:
    return [sum(column) for column in zip(*vectors, strict=True)]


def _of(sites: Iterable[SiteResult], direction: str) -> list[SiteResult]:
    return [site for site in sites if site.key.direction == direction]


def _direction_result(figures: dict[str, Figures], sites: Sequence[SiteResult], codecs: set[str]) -> DirectionResult:
    measured = [site for site in sites if site.figures]
    points = {name: (each.bits_per_value, each.relative_l2_error) for name, each in figures.items() if name in codecs}
    return DirectionResult(
        num_sites=len(measured),
        num_observed=sum(site.num_observed for site in measured),
        figures=figures,
        worst={name: _worst_site(measured, name) for name in figures},
        median={name: median(site.figures[name].relative_l2_error for site in measured) for name in figures},
        pareto=pareto_front(points),
    )


def _worst_site(sites: Sequence[SiteResult], name: str) -> WorstSite:
    site = max(sites, key=lambda each: each.figures[name].relative_l2_error)
    return WorstSite(site.place, site.key.direction, site.key.kind, site.figures[name].relative_l2_error)


def _direction_json(direction: DirectionResult) -> dict[str, Any]:
    codecs = {name: _codec_json(direction, name) for name in direction.figures}
    return {"num_sites": direction.num_sites, "num_observed": direction.num_observed, "codecs": codecs}


def _codec_json(direction: DirectionResult, name: str) -> dict[str, Any]:
    worst = direction.worst[name]
    return {
        **_figures_json(direction.figures[name]),
        "median_site_relative_l2_error": _finite(direction.median[name]),
        "worst_site": {**asdict(worst), "relative_l2_error": _finite(worst.relative_l2_error)},
        "is_pareto": name in direction.pareto,
    }


def _site_json(site: SiteResult) -> dict[str, Any]:
    return {
        "site": site.key.site,
        "direction": site.key.direction,
        "kind": site.key.kind,
        "shape": list(site.shape),
        "dtype": site.dtype,
        "num_seen": site.num_seen,
        "num_observed": site.num_observed,
        "num_nonfinite": site.num_nonfinite,
        "energy_share": site.energy_share,
        "cancellation": _finite(site.cancellation),
        "codecs": {name: _figures_json(figures) for name, figures in site.figures.items()},
    }


def _figures_json(figures: Figures) -> dict[str, float | None]:
    values = {name: _finite(value) for name, value in asdict(figures).items()}
    return values | {"relative_l2_error_db": _finite(decibels(figures.relative_l2_error))}


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
