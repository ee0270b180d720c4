"""The only place that looks at the versions of torch, triton and lightning, and at what a device can do."""

from __future__ import annotations

import importlib.util
import re
from functools import lru_cache

import torch
import torch.distributed as dist

OLDEST_TORCH = (2, 11)
NEWEST_TORCH = (2, 13)
FP8_CAPABILITY = (8, 9)


# torch 2.13 renamed it and warns at each call of the old name.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def torch_version() -> tuple[int, int]:
    """Major and minor version of the installed torch."""
    return _major_minor(torch.__version__)


def require_known_torch() -> None:
    """Refuse a torch whose redistribution this package was not tested with.

    Raises:
        RuntimeError: outside the supported range, naming the range and the remedy.
    """
    if not OLDEST_TORCH <= torch_version() <= NEWEST_TORCH:
        oldest, newest = ".".join(map(str, OLDEST_TORCH)), ".".join(map(str, NEWEST_TORCH))
        raise RuntimeError(
            f"torch {torch.__version__} is installed, but lightning_taco compresses the redistribution of DTensor in "
            f"torch {oldest} to {newest} only, since it changes at each minor release. Install "
            f"'torch>={oldest},<{NEWEST_TORCH[0]}.{NEWEST_TORCH[1] + 1}', or pass compression=None."
        )


@lru_cache(maxsize=1)
def has_triton() -> bool:
    """Whether triton can be imported; without it the torch reference runs everywhere."""
    return importlib.util.find_spec("triton") is not None


@lru_cache(maxsize=8)
def has_native_fp8(device_index: int) -> bool:
    """Whether this CUDA device converts to E4M3 in hardware (compute capability 8.9 and later)."""
    return torch.cuda.get_device_capability(device_index) >= FP8_CAPABILITY


def supports_fp8(device: torch.device) -> bool:
    """Whether ``element="auto"`` means E4M3 on this device: CPU, and CUDA from compute capability 8.9 on."""
    if device.type != "cuda":
        return True
    return has_native_fp8(device.index if device.index is not None else torch.cuda.current_device())


def _major_minor(version: str) -> tuple[int, int]:
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None:
        raise RuntimeError(f"cannot read the version {version!r}")
    return int(match.group(1)), int(match.group(2))
