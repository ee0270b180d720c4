"""How the codec's kernels are launched: fixed configurations, and a short way to what Triton has compiled."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from lightning_taco import _compat
from lightning_taco.codec.constants import MAX_WIDTH, THREADS_PER_PROGRAM, KernelConstants
from lightning_taco.config import CodecConfig

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
DEFAULT_WARPS = THREADS_PER_PROGRAM // 32
# A seed that is 1, or a multiple of 16, would have a kernel of its own compiled, in the middle of a run.
SEEDS = ["seed_low", "seed_high"]
NUMBERING = ["first_block", "row_blocks"]
# What Triton has compiled, by all that it compiles for. Its own way from a call to its compiled kernel reads every
# argument and compares every global constant anew: tens of microseconds of the host's time.
_compiled: dict[tuple[Any, ...], Any] = {}


def launch(
    kernel: Any,
    grid: tuple[int, int, int],
    arguments: tuple[Any, ...],
    constants: tuple[Any, ...],
    *,
    num_warps: int = DEFAULT_WARPS,
) -> None:
    """Launch `kernel` on the device of the tensor that is the first of `arguments`.

    Args:
        kernel: a function of Triton's.
        grid: programs along each axis.
        arguments: tensors and numbers, in the order of its parameters.
        constants: those of its parameters that are constants, which come last.
        num_warps: of a program; always the same for one kernel.
    """
    device = arguments[0].device
    options = {"num_warps": num_warps, "enable_fp_fusion": False}
    with _on_device(device):
        if INTERPRETED:
            kernel[grid](*arguments, *constants, **options)
            return
        key = (kernel.fn, device.index, *constants, *map(_specialization, arguments))
        compiled = _compiled.get(key)
        if compiled is None:
            _compiled[key] = kernel[grid](*arguments, *constants, **options)
        else:
            compiled[grid](*arguments, *constants)


def grid_of(num_values: int, constants: KernelConstants, num_rows: int) -> tuple[int, int, int]:
    """One program for each tile of each of `num_rows` messages of `num_values`."""
    num_blocks = -(-num_values // constants.block_size)
    return -(-num_blocks // constants.tile), num_rows, 1


def seed_halves(seed: int) -> tuple[int, int]:
    """Both as integers of 32 bits that are not negative."""
    return seed & 0x7FFFFFFF, seed >> 31


def constants_of(codec: CodecConfig, device: torch.device, num_values: int | None = None) -> KernelConstants:
    """What kernels of `codec` are compiled for on `device`, for rows of `num_values`, or of any number."""
    constants = _constants_of(codec, device)
    return constants if num_values is None else constants.for_values(num_values)


def constants_of_both(
    codec: CodecConfig, other: CodecConfig, device: torch.device, num_values: int
) -> tuple[KernelConstants, KernelConstants]:
    """The same of two codecs of one block size, whose tiles are held alike."""
    width = min(_constants_of(codec, device).width, _constants_of(other, device).width)
    first, second = _constants_of(codec, device, width), _constants_of(other, device, width)
    return first.for_values(num_values), second.for_values(num_values)


def _constants_of(codec: CodecConfig, device: torch.device, max_width: int = MAX_WIDTH) -> KernelConstants:
    is_nvidia = device.type == "cuda" and not INTERPRETED and torch.version.hip is None
    return KernelConstants.of(codec, is_nvidia, is_nvidia and _compat.supports_fp8(device), max_width)


def _specialization(argument: Tensor | int | float) -> Any:
    """What Triton compiles for: dtype and alignment of a tensor, class of an integer."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if isinstance(argument, float):
        return float
    return argument == 1, argument % 16 == 0, argument < 1 << 31


def _on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Triton launches on the current device, which need not be the tensor's."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)
