"""What FSDP2 gathers and reduces together, read off a module: its ranks, and which values of a rank's row are whose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_taco import _compat


@dataclass(frozen=True)
class Columns:
    """The values of a row, parameter by parameter, and which of them every tensor-parallel rank holds whole.

    Those may not share a block with values that differ between tensor-parallel ranks: their rounding would differ too,
    and what is replicated would come apart.
    """

    widths: tuple[int, ...]
    are_whole: tuple[bool, ...]

    @property
    def num_values(self) -> int:
        """Values of a row."""
        return sum(self.widths)

    @cached_property
    def is_mixed(self) -> bool:
        """Whether a row has values of both kinds."""
        present = {whole for width, whole in zip(self.widths, self.are_whole, strict=True) if width}
        return len(present) == 2

    def in_parts(self, rows: Tensor, out: Tensor, exchange: Callable[[int, Tensor, Tensor], None]) -> None:
        """Call ``exchange(part, rows, out)`` for the whole row, or for the values of either kind, laid together.

        Args:
            rows: ``[R, N]``.
            out: ``[..., N]``; what `exchange` has written for a part is put into its place.
            exchange: reads the rows of a part and fills the `out` of it, contiguous.
        """
        if not self.is_mixed:
            exchange(0, rows, out)
            return
        for part, wanted in enumerate((True, False)):
            part_rows = torch.cat(self._pieces(rows, wanted), dim=-1)
            part_out = torch.cat(self._pieces(out, wanted), dim=-1)
            exchange(part, part_rows, part_out)
            pieces = self._pieces(out, wanted)
            for piece, values in zip(pieces, part_out.split([p.shape[-1] for p in pieces], dim=-1), strict=True):
                piece.copy_(values)

    def _pieces(self, rows: Tensor, wanted: bool) -> list[Tensor]:
        parts = rows.split(list(self.widths), dim=-1)
        return [part for part, whole in zip(parts, self.are_whole, strict=True) if whole == wanted]


@dataclass(frozen=True)
class FsdpUnit:
    """One parameter group of FSDP2.

    Attributes:
        name: of the module, for seeds, counters and checkpoints.
        module: to which FSDP2 was applied.
        group: the ranks over which its parameters are sharded.
        gathered: the columns of an all-gather: all parameters.
        reduced: the columns of a reduce-scatter: parameters that get a gradient.
        replicas: the ranks over which FSDP2 itself all-reduces, under HSDP; ``None`` without.
        reduces_in_half: whether gradients are reduced in fp16, whose sums may overflow.
    """

    name: str
    module: nn.Module
    group: dist.ProcessGroup
    gathered: Columns
    reduced: Columns
    replicas: dist.ProcessGroup | None
    reduces_in_half: bool

    @property
    def num_ranks(self) -> int:
        """Over which FSDP2 itself reduces, those of all replicas."""
        return self.group.size() * (1 if self.replicas is None else self.replicas.size())

    @property
    def fsdp(self) -> FSDPModule:
        """`module` with the methods that FSDP2 gave it."""
        assert isinstance(self.module, FSDPModule)
        return self.module


def fsdp_units(module: nn.Module) -> list[FsdpUnit]:
    """The units of `module`, in the order of its modules.

    Raises:
        ValueError: for a module whose parameters have meshes of their own, for which FSDP2 takes no custom exchange.
    """
    units = []
    for name, child in _sharded_modules(module):
        groups = _compat.fsdp_param_groups(child)
        if len(groups) > 1:
            raise ValueError(
                f"FSDP2 shards the parameters of {name or type(child).__name__} over several meshes, and takes no "
                "custom exchange for such a module; give all parameters of a fully_shard call one mesh."
            )
        units += [_unit(name, child, group) for group in groups]
    return units


def fsdp_parameters(module: nn.Module) -> set[int]:
    """``id`` of every parameter that FSDP2 shards."""
    groups = [group for _, child in _sharded_modules(module) for group in _compat.fsdp_param_groups(child)]
    return {id(param.sharded_param) for group in groups for param in group.fsdp_params}


def _sharded_modules(module: nn.Module) -> list[tuple[str, nn.Module]]:
    named: list[tuple[str, nn.Module]] = list(module.named_modules())
    return [(name, child) for name, child in named if isinstance(child, FSDPModule)]


def _unit(name: str, module: nn.Module, group: Any) -> FsdpUnit:
    mesh_info, params = group.mesh_info, group.fsdp_params
    columns = Columns(
        tuple(param.padded_sharded_param_size.numel() for param in params),
        tuple(_is_whole(param.sharded_param, mesh_info.mesh.ndim) for param in params),
    )
    gets_gradient = [param.sharded_param.requires_grad for param in params]
    reduced = replace(
        columns,
        widths=tuple(width for width, wanted in zip(columns.widths, gets_gradient, strict=True) if wanted),
        are_whole=tuple(whole for whole, wanted in zip(columns.are_whole, gets_gradient, strict=True) if wanted),
    )
    return FsdpUnit(
        name,
        module,
        mesh_info.shard_process_group,
        columns,
        reduced,
        replicas=getattr(mesh_info, "replicate_process_group", None),
        reduces_in_half=_reduce_dtype(group) == torch.float16,
    )


def _reduce_dtype(group: Any) -> torch.dtype | None:
    policy, params = group.mp_policy, group.fsdp_params
    return policy.reduce_dtype or policy.param_dtype or (params[0].sharded_param.dtype if params else None)


def _is_whole(parameter: Tensor, num_fsdp_axes: int) -> bool:
    """Whether `parameter` is the same on all ranks of the axes that come after FSDP2's."""
    if not isinstance(parameter, DTensor):
        return True
    mesh = parameter.device_mesh
    return all(
        parameter.placements[axis].is_replicate() or mesh.size(axis) == 1 for axis in range(num_fsdp_axes, mesh.ndim)
    )
