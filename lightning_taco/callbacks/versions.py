"""The versions that a log or a report names."""

from __future__ import annotations

import platform
from importlib import metadata

import lightning_taco

PACKAGES = ("torch", "lightning", "triton", "plotly")


def versions() -> dict[str, str]:
    """Of this package, of Python, and of those `PACKAGES` that are installed."""
    found = {"lightning_taco": lightning_taco.__version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
