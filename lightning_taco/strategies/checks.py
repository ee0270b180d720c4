"""Refuses, with a sentence, what tensor parallelism would turn into a hang, a crash on one rank or a wrong result.

Every check decides from what all ranks share (sizes, plans, settings), or agrees over the group first, so all ranks
raise the same error and none is left waiting in a collective.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.utils.hooks import RemovableHandle

from lightning_taco import _compat

SUPPORTED_DEVICES = ("cpu", "cuda")
HEAD_SIZE_NAMES = ("head_dim", "head_size", "d_head", "attention_head_size")
HEAD_COUNT_NAMES = ("num_heads", "n_heads", "n_head", "num_attention_heads", "nhead")
KV_HEAD_COUNT_NAMES = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "num_query_groups")
UNEVEN_SEQUENCE_TORCH = (2, 13)  # the first in which a linear takes a DTensor whose sequence is split unevenly


def check_mesh_sizes(
    data_parallel_size: int | str,
    tensor_parallel_size: int | str,
    world_size: int,
    *,
    num_nodes: int = 1,
    pipeline_parallel_size: int = 1,
) -> None:
    """Refuse sizes that do not use every process exactly once; runs before any process starts.

    Args:
        data_parallel_size: ranks along the data-parallel axis; ``"auto"`` is the number of nodes.
        tensor_parallel_size: ranks along the tensor-parallel axis; ``"auto"`` is the number of processes of a node.
        world_size: processes of the run, on all nodes.
        num_nodes: nodes of the run.
        pipeline_parallel_size: ranks along the pipeline axis.

    Raises:
        TypeError: for a size that is neither an integer nor ``"auto"``.
        ValueError: for a size below 1, or a product that is not `world_size`.
    """
    stages = pipeline_parallel_size
    data, tensor = resolved_sizes(data_parallel_size, tensor_parallel_size, world_size, num_nodes, stages)
    if data * stages * tensor == world_size:
        return
    if world_size % (stages * tensor) == 0:
        fix = f"data_parallel_size={world_size // (stages * tensor)}"
    elif world_size % (stages * data) == 0:
        fix = f"tensor_parallel_size={world_size // (stages * data)}"
    elif stages > 1:
        fix = f"data_parallel_size=1, pipeline_parallel_size=1 and tensor_parallel_size={world_size}"
    else:
        fix = f"data_parallel_size=1 and tensor_parallel_size={world_size}"
    pipeline = f"pipeline_parallel_size={stages} x " if stages > 1 else ""
    raise ValueError(
        f"data_parallel_size={data} x {pipeline}tensor_parallel_size={tensor} needs {data * stages * tensor} "
        f"processes, but this run has {world_size} (num_nodes={num_nodes} x devices={world_size // num_nodes}). Use "
        f"{fix}, or change devices and num_nodes so that their product is {data * stages * tensor}."
    )


def resolved_sizes(
    data_parallel_size: int | str,
    tensor_parallel_size: int | str,
    world_size: int,
    num_nodes: int,
    pipeline_parallel_size: int = 1,
) -> tuple[int, int]:
    """The sizes of the data-parallel and the tensor-parallel axis.

    ``"auto"`` is the number of nodes, and the processes of a node, as far as the pipeline's stages leave them.

    Raises:
        TypeError: for a size that is neither an integer nor ``"auto"``.
        ValueError: for a size below 1.
    """
    data = _resolved_size("data_parallel_size", data_parallel_size, num_nodes)
    automatic = max(1, world_size // num_nodes // pipeline_parallel_size)
    return data, _resolved_size("tensor_parallel_size", tensor_parallel_size, automatic)


def check_processes(
    devices: Sequence[torch.device] | None,
    data_parallel_size: int | str,
    tensor_parallel_size: int | str,
    num_nodes: int,
    pipeline_parallel_size: int = 1,
) -> None:
    """What a strategy can refuse before it starts a process: `check_accelerator` and `check_mesh_sizes`.

    Args:
        devices: those of one node, one for each process.
        data_parallel_size: as for `check_mesh_sizes`.
        tensor_parallel_size: as for `check_mesh_sizes`.
        num_nodes: nodes of the run.
        pipeline_parallel_size: as for `check_mesh_sizes`.
    """
    assert devices, "Lightning gives a strategy its devices before it asks for a launcher"
    check_accelerator(devices[0].type)
    check_mesh_sizes(
        data_parallel_size,
        tensor_parallel_size,
        num_nodes * len(devices),
        num_nodes=num_nodes,
        pipeline_parallel_size=pipeline_parallel_size,
    )


def check_accelerator(device_type: str) -> None:
    """Refuse every device but CPU and CUDA.

    Raises:
        ValueError: naming the device.
    """
    if device_type not in SUPPORTED_DEVICES:
        raise ValueError(
            f"accelerator {device_type!r} is not supported: DTensor's collectives run here over gloo on CPU or NCCL on "
            f'CUDA. Use accelerator="gpu" on a machine with NVIDIA GPUs, or accelerator="cpu".'
        )


def check_pipeline_callbacks(callbacks: Iterable[object]) -> None:
    """Refuse callbacks that cannot work on a rank that has some layers of a model only.

    Raises:
        ValueError: for those that average weights, and for `ThroughputReport`.
    """
    for callback in callbacks:
        names = {base.__name__ for base in type(callback).__mro__}
        if "WeightAveraging" in names:
            raise ValueError(
                f"{type(callback).__name__} copies the whole model on each rank, but under a pipeline a rank has the "
                "layers of its stages only; leave it out, or use pipeline_parallel_size=1."
            )
        if "ThroughputReport" in names:
            raise ValueError(
                "ThroughputReport takes all time of a step that is not exchange for compute, but under a pipeline a "
                "stage waits for others; leave it out, and measure by examples/benchmarks/pipeline.py."
            )


def check_callbacks(callbacks: Iterable[object]) -> None:
    """Refuse callbacks that cannot work on a model whose parameters are DTensors.

    Raises:
        ValueError: for ``StochasticWeightAveraging``.
        TypeError: for a callback of the ``pytorch_lightning`` package.
    """
    for callback in callbacks:
        check_unified_package(callback)
        if any(
            base.__name__ == "StochasticWeightAveraging" and base.__module__.startswith("lightning.")
            for base in type(callback).__mro__
        ):
            raise ValueError(
                "StochasticWeightAveraging copies plain tensors into DTensor parameters, which torch refuses, so it "
                "cannot run under tensor parallelism; use lightning.pytorch.callbacks.EMAWeightAveraging instead."
            )


def check_unified_package(*objects: object) -> None:
    """Refuse objects whose class comes from ``pytorch_lightning``, the other class tree, without importing it.

    Raises:
        TypeError: naming the class and the import to change.
    """
    for instance in objects:
        kind = instance if isinstance(instance, type) else type(instance)
        for base in kind.__mro__:
            if base.__module__.split(".")[0] == "pytorch_lightning":
                derived = "" if base is kind else f" (a {base.__module__}.{base.__name__})"
                raise TypeError(
                    f"{kind.__module__}.{kind.__qualname__}{derived} belongs to the package pytorch_lightning, whose "
                    f"classes are not those of the package lightning that lightning_taco extends. Change the import: "
                    f"`import lightning as L` or `from lightning.pytorch import {base.__name__}`."
                )


def check_parallelized(module: nn.Module, mesh: DeviceMesh) -> str | None:
    """Why nothing that `module` exchanges over `mesh` (the tensor-parallel axis) can be compressed.

    Returns:
        The reason, or ``None`` when a parameter is split over the axis. ``None`` also means that the parallelization
        plan must not be applied again.
    """
    if mesh.size() == 1:
        return "tensor_parallel_size is 1, so there is no tensor-parallel exchange"
    dtensors = [parameter for parameter in module.parameters() if isinstance(parameter, DTensor)]
    if not dtensors:
        return "no parameter is a DTensor; apply parallelize_module with device_mesh['tensor_parallel']"
    placements = {_placement_on(parameter, mesh) for parameter in dtensors}
    if placements == {None}:
        return "its DTensors are on other mesh axes; apply parallelize_module with device_mesh['tensor_parallel']"
    if placements <= {None, Replicate()}:
        return "every parameter is whole on each tensor-parallel rank; split some by ColwiseParallel, RowwiseParallel"
    return None


def check_even_shards(module: nn.Module, mesh: DeviceMesh) -> None:
    """Refuse splits that give wrong shapes; call it once the parallelization plan was applied.

    Uneven splits are right wherever torch knows the full size: vocabulary-parallel embeddings and heads of any size,
    and layers that hand DTensors on. They are wrong where a row-parallel linear gets the uneven shard of a
    column-parallel one as a plain tensor, of which it takes the full size to be TP times the shard's; and where a
    rank would hold a part of an attention head.

    Args:
        module: the parallelised model.
        mesh: its tensor-parallel axis (one-dimensional).

    Raises:
        ValueError: naming the layer or the attribute, the size, the TP degree and sizes that work.
    """
    if mesh.size() == 1:
        return
    linears = {
        name: _Linear(name, child, placement)
        for name, child in module.named_modules()
        if isinstance(child, nn.Linear) and (placement := _placement_on(child.weight, mesh)) is not None
    }
    columns = {name: linear for name, linear in linears.items() if linear.placement == Shard(0)}
    for row in linears.values():
        if row.placement == Shard(1) and row.module.in_features % mesh.size():
            _check_row_input(row, columns, mesh.size())
    for name, child in module.named_modules():
        sizes = {
            key: columns[path].module.out_features
            for key, _ in child.named_children()
            if (path := _join(name, key)) in columns and _is_attention(key)
        }
        _check_heads(name or type(child).__name__, child, sizes, mesh.size())


def check_sequence_length(num_tokens: int, tensor_parallel_size: int, name: str = "the input") -> None:
    """Refuse a sequence that sequence parallelism cannot split evenly.

    Args:
        num_tokens: length of the dim that is split.
        tensor_parallel_size: over how many ranks.
        name: what has this length, for the message.

    Raises:
        ValueError: with the length and the degree.
    """
    if num_tokens % tensor_parallel_size:
        raise ValueError(
            f"{name} has a sequence length of {num_tokens}, which tensor_parallel_size={tensor_parallel_size} does not "
            f"divide: under sequence parallelism every rank holds an equal part. Pad or cut the sequence to "
            f"{_neighbours(num_tokens, tensor_parallel_size)} tokens (a DataLoader's last batch too)."
        )


def add_sequence_length_checks(module: nn.Module, mesh: DeviceMesh) -> list[RemovableHandle]:
    """Run `check_sequence_length` on the input of each embedding whose output is split along the sequence.

    An uneven split reaches the other layers as plain tensors of different lengths, on which gloo aborts one rank and
    NCCL may hang. The embedding is the last place that sees the full length, on every rank. An embedding that hands on
    a DTensor is left alone where torch is right about it.

    Returns:
        Handles that remove the checks.
    """

    def check(name: str, dim: int, child: nn.Module, inputs: tuple[Any, ...]) -> None:
        if inputs and isinstance(inputs[0], Tensor) and dim < inputs[0].ndim:
            check_sequence_length(inputs[0].shape[dim], mesh.size(), f"the input of {name}")

    handles = []
    for name, child in module.named_modules():
        if isinstance(child, nn.Embedding) and _placement_on(child.weight, mesh) is not None and mesh.size() > 1:
            placement, is_plain = _output_style(child)
            is_refused = is_plain or _compat.torch_version() < UNEVEN_SEQUENCE_TORCH
            if isinstance(placement, Shard) and placement.dim >= 0 and is_refused:
                hook = functools.partial(check, name or type(child).__name__, placement.dim)
                handles.append(_compat.register_first(child, hook))
    return handles


class _Linear(NamedTuple):
    """A linear layer that is split over the tensor-parallel axis."""

    name: str
    module: nn.Linear
    placement: Placement

    @property
    def hands_on_plain_shard(self) -> bool:
        """Whether its output is its own shard of the features, as a tensor that does not know the full size."""
        return _output_style(self.module) == (Shard(-1), True)


def _resolved_size(name: str, size: int | str, automatic: int) -> int:
    if size == "auto":
        return automatic
    if isinstance(size, bool) or not isinstance(size, int):
        raise TypeError(f"{name}={size!r} is neither a number of ranks nor 'auto'; give an integer from 1 up.")
    if size < 1:
        raise ValueError(f"{name}={size} is below 1; give the number of ranks along this axis, or 'auto'.")
    return size


def _placement_on(tensor: Tensor, mesh: DeviceMesh) -> Placement | None:
    """How `tensor` lies on the axis that `mesh` is; compared by ranks, as a second fit has a new mesh of the same."""
    if not isinstance(tensor, DTensor):
        return None
    ranks = dist.get_process_group_ranks(mesh.get_group())
    for axis, placement in enumerate(tensor.placements):
        if dist.get_process_group_ranks(tensor.device_mesh.get_group(axis)) == ranks:
            return placement
    return None


def _style_arguments(hooks: Mapping[int, Any]) -> Iterator[tuple[Any, ...]]:
    """What torch's parallel styles were made with: `distribute_module` hooks them in as partials inside a closure."""
    for hook in hooks.values():
        for cell in getattr(hook, "__closure__", None) or ():
            if isinstance(cell.cell_contents, functools.partial):
                yield cell.cell_contents.args


def _input_placement(module: nn.Module) -> Placement | None:
    """The layout that a style takes a plain input to have; ``None`` if this is no style that we can read."""
    for arguments in _style_arguments(module._forward_pre_hooks):
        match arguments:
            case ((Placement() as placement,), (Placement(),)):
                return placement
    return None


def _output_style(module: nn.Module) -> tuple[Placement | None, bool]:
    """The layout of a style's output, and whether it is handed on as a plain tensor."""
    for arguments in _style_arguments(module._forward_hooks):
        match arguments:
            case ((Placement() as placement,), bool() as is_plain):
                return placement, is_plain
    return None, False


def _check_row_input(row: _Linear, columns: Mapping[str, _Linear], tensor_parallel_size: int) -> None:
    """Raise a ValueError if a column-parallel linear beside `row` feeds it an uneven shard as a plain tensor."""
    if _input_placement(row.module) != Shard(-1):
        return
    size = row.module.in_features
    for column in _nearest(row.name, columns):
        # Fused projections (q, k, v; gate and up) hand on several times the size.
        if column.hands_on_plain_shard and column.module.out_features % size == 0:
            raise ValueError(
                f"{row.name} takes {size} features, split over tensor_parallel_size={tensor_parallel_size}, which does "
                f"not divide {size}; {column.name} hands its shard on as a plain tensor, from which the full size "
                f"cannot be told. Use a size of {_neighbours(size, tensor_parallel_size)}, or give {column.name} "
                f"ColwiseParallel(use_local_output=False)."
            )


def _nearest(name: str, columns: Mapping[str, _Linear]) -> list[_Linear]:
    """The column-parallel linears in the smallest module around `name` that has any."""
    parts = name.split(".")[:-1]
    for depth in range(len(parts), -1, -1):
        prefix = "".join(f"{part}." for part in parts[:depth])
        if found := [column for path, column in columns.items() if path.startswith(prefix)]:
            return found
    return []


def _check_heads(path: str, module: nn.Module, sizes: Mapping[str, int], tensor_parallel_size: int) -> None:
    """Raise a ValueError if a rank would hold a part of an attention head of `module`.

    Args:
        path: name of `module`.
        module: what holds the projections.
        sizes: full output size of each column-parallel projection to queries, keys or values.
        tensor_parallel_size: over how many ranks they are split.
    """
    head_size_name, head_size = next(_integers(module, HEAD_SIZE_NAMES), ("", 0))
    for name, count in _integers(module, HEAD_COUNT_NAMES + KV_HEAD_COUNT_NAMES):
        split = [size for key, size in sizes.items() if name in HEAD_COUNT_NAMES or not _is_query(key)]
        # With a known head size, a count that was divided by TP already does not fit the projections' full size.
        whole_sizes = (count * head_size, 3 * count * head_size)
        is_full_count = any(size in whole_sizes if head_size else size % count == 0 for size in split)
        if count % tensor_parallel_size and is_full_count:
            hint = "" if head_size else f" If {count} is the count per rank already, set head_dim on the module, too."
            raise ValueError(
                f"{path}.{name}={count} is not divisible by tensor_parallel_size={tensor_parallel_size}, so a rank "
                f"would hold a part of a head. Use {_neighbours(count, tensor_parallel_size)} heads, or a "
                f"tensor_parallel_size that divides {count}.{hint}"
            )
    for key, size in sizes.items():
        if head_size and size % head_size == 0 and (size // head_size) % tensor_parallel_size:
            count = size // head_size
            raise ValueError(
                f"{path}.{key} computes {count} heads ({head_size_name}={head_size}), and {count} is not divisible by "
                f"tensor_parallel_size={tensor_parallel_size}, so a rank would hold a part of a head. Use "
                f"{_neighbours(count, tensor_parallel_size)} heads, or a tensor_parallel_size that divides {count}."
            )


def _is_attention(name: str) -> bool:
    """Whether a linear of this name projects to queries, keys or values, and does not belong to an MLP beside them."""
    return "att" in name.lower() or any(letter in name.lower() for letter in "qkv")


def _is_query(name: str) -> bool:
    return "q" in name.lower() and not any(letter in name.lower() for letter in "kv")


def _integers(module: nn.Module, names: Iterable[str]) -> Iterator[tuple[str, int]]:
    for name in names:
        value = getattr(module, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            yield name, value


def _neighbours(size: int, divisor: int) -> str:
    below = size // divisor * divisor
    return f"{below} or {below + divisor}" if below else f"{divisor}"


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
