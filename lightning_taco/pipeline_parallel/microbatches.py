"""A batch cut into micro-batches, and what steps return for them put together again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_taco import _compat

REPEATED = (bool, int, float, type(None))
"""Types of what is given to each micro-batch as it is."""


def batch_size_of(batch: Any) -> int:
    """The first dim of the tensors in `batch`.

    Raises:
        ValueError: for none, an empty batch, or tensors of different first dims.
        TypeError: for contents that cannot be cut.
    """
    sizes = set()
    for leaf in _compat.leaves_of(batch):
        if isinstance(leaf, Tensor):
            if leaf.dim():
                sizes.add(leaf.shape[0])
        elif not isinstance(leaf, REPEATED):
            raise TypeError(
                f"A batch for a pipeline holds a {type(leaf).__name__}, of which it is not known how it is cut into "
                "micro-batches; collate it into tensors whose first dim is the batch."
            )
    if len(sizes) != 1 or 0 in sizes:
        given = ", ".join(map(str, sorted(sizes))) or "no tensor"
        raise ValueError(
            f"A batch for a pipeline needs tensors of one first dim, at least 1, to be cut along it; this one has "
            f"{given}."
        )
    return sizes.pop()


def cut_batch(batch: Any, num_microbatches: int) -> list[Any]:
    """`num_microbatches` batches of equal size, views of the tensors of `batch`; the rest is the same in each."""
    leaves, rebuild = _compat.flattened(batch)
    parts = [
        leaf.chunk(num_microbatches) if isinstance(leaf, Tensor) and leaf.dim() else (leaf,) * num_microbatches
        for leaf in leaves
    ]
    return [rebuild([part[index] for part in parts]) for index in range(num_microbatches)]


def shapes_of(batch: Any) -> str:
    """Shapes and dtypes of the tensors in `batch`, in words."""
    leaves = _compat.leaves_of(batch)
    return ", ".join(f"{leaf.dtype} {list(leaf.shape)}" for leaf in leaves if isinstance(leaf, Tensor))


def merged(results: Sequence[Any]) -> Any:
    """What a step returned for each micro-batch as what it would have returned for the batch.

    Numbers and tensors without dims are averaged, other tensors joined along their first dim.

    Raises:
        TypeError: for anything else, or results of different structure.
    """
    flat = [_compat.flattened(result) for result in results]
    columns = list(zip(*(leaves for leaves, _ in flat), strict=False))
    if len({len(leaves) for leaves, _ in flat}) > 1:
        raise TypeError("A step returned something of another structure for one micro-batch than for another.")
    return flat[0][1]([_merged_leaf(column) for column in columns])


def _merged_leaf(values: Sequence[Any]) -> Any:
    first = values[0]
    if isinstance(first, Tensor):
        values = [value.detach() for value in values]
        return torch.cat(list(values)) if first.dim() else mean(values)
    if isinstance(first, (int, float)) and not isinstance(first, bool):
        return sum(values) / len(values)
    if all(value is first or value == first for value in values) and isinstance(first, (str, bool, type(None))):
        return first
    raise TypeError(
        f"A step returned a {type(first).__name__} for each of {len(values)} micro-batches, which cannot be put "
        "together; return tensors whose first dim is the batch, or numbers, which are averaged."
    )


def mean(values: Sequence[Tensor]) -> Tensor:
    """The mean of tensors without dims, in fp32 at least, in the dtype of the first."""
    first = values[0]
    if not first.dtype.is_floating_point:
        return torch.stack(list(values)).double().mean()
    wide = torch.promote_types(first.dtype, torch.float32)
    return torch.stack([value.to(wide) for value in values]).mean().to(first.dtype)
