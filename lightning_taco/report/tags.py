"""What the tags of a log mean: losses, gradient norms, figures of the compression, and figures of one of its sites."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

DIRECTIONS = ("forward", "backward")
RELATIVE_ERROR = "relative_error"
NONFINITE = "nonfinite"
RATIO = "compression/ratio"
GRADIENT_NORMS = ("gradient_norm", "clipped_gradient_norm")
LAYER_NORM = "layer_gradient_norm/"
COSINE = "gradient_cosine"
TIMES = "throughput/"
EVALUATION = re.compile(r"(^|[/_.-])(val|valid|validation|test|eval)([/_.-]|$)", re.IGNORECASE)


class SiteTag(NamedTuple):
    """A figure of one site: ``compression/<measure>/<direction>/<site>/<kind>``."""

    measure: str
    direction: str
    site: str
    kind: str

    @property
    def place(self) -> str:
        """Direction, site and kind as events name them."""
        return f"{self.direction}/{self.site}/{self.kind}"


def site_tag(tag: str) -> SiteTag | None:
    """The parts of a tag of one site; ``None`` for any other. A site's name may itself hold slashes.

    >>> site_tag("compression/relative_error/forward/blocks.0.down/all_reduce")
    SiteTag(measure='relative_error', direction='forward', site='blocks.0.down', kind='all_reduce')
    >>> site_tag("compression/ratio")
    """
    parts = tag.split("/", 3)
    if len(parts) < 4 or parts[0] != "compression" or parts[2] not in DIRECTIONS:
        return None
    site, _, kind = parts[3].rpartition("/")
    return SiteTag(parts[1], parts[2], site, kind) if site else None


def is_loss(tag: str) -> bool:
    """Whether a tag is a loss by its name, such as ``train_loss`` or ``val/loss``."""
    return "loss" in tag.lower() and not tag.startswith("compression/")


def is_evaluation(tag: str) -> bool:
    """Whether a tag is measured on other data than that of the training.

    >>> is_evaluation("val_loss"), is_evaluation("train/loss"), is_evaluation("interval")
    (True, False, False)
    """
    return EVALUATION.search(tag) is not None


def in_model_order(names: Iterable[str]) -> list[str]:
    """Sorted, with numbers by their value.

    >>> in_model_order(["blocks.10", "blocks.9"])
    ['blocks.9', 'blocks.10']
    """
    return sorted(names, key=natural_key)


def natural_key(name: str) -> list[tuple[int, str]]:
    """A key by which ``blocks.9`` comes before ``blocks.10``."""
    # More digits than this are no number of a layer, and Python refuses to read thousands of them.
    return [(int(part), "") if re.fullmatch("[0-9]{1,18}", part) else (-1, part) for part in re.split("([0-9]+)", name)]
