"""Small exact agreements between ranks, made once before any step."""

from __future__ import annotations

from typing import Literal

import torch
import torch.distributed as dist

from lightning_taco import _compat


def agree_on_element(group: dist.ProcessGroup, device: torch.device) -> Literal["e4m3", "int8"]:
    """What ``element="auto"`` means on all ranks of `group`: E4M3 if every rank's device has it, else INT8.

    Ranks with different GPUs would otherwise send codes that their peers read as another format.
    Cost: one all-reduce of one integer, and one wait for it.
    """
    supported = torch.tensor([int(_compat.supports_fp8(device))], device=device)
    dist.all_reduce(supported, op=dist.ReduceOp.MIN, group=group)
    return "e4m3" if supported.item() else "int8"
