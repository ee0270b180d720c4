"""What a model says of itself to be cut into stages, and where it is cut.

A module that is to be cut has a method ``pipeline_layers()``, which lists in order what its ``forward`` runs one after
another: modules, or ``(function, *modules)`` for a function of one or more modules. Each takes what the one before
returns (a tuple as several arguments).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from torch import nn

from lightning_taco import _compat

LAYERS_METHOD = "pipeline_layers"


class Layer(NamedTuple):
    """One step of a forward: what is called, and the modules whose parameters it uses."""

    function: Callable[..., Any]
    modules: tuple[nn.Module, ...]

    def parameters(self) -> list[nn.Parameter]:
        """Each parameter once."""
        found = {id(parameter): parameter for module in self.modules for parameter in module.parameters()}
        return list(found.values())


def find_pipelined(root: nn.Module) -> tuple[str, nn.Module]:
    """Name and module of the one within `root` that has ``pipeline_layers``.

    Raises:
        TypeError: for none, for several, or where `torch.compile` wraps it.
    """
    found = [(name, module) for name, module in root.named_modules() if hasattr(type(module), LAYERS_METHOD)]
    if not found:
        raise TypeError(
            f"pipeline_parallel_size > 1 needs to know how {type(root).__name__} is cut, but no module of it has a "
            f"method {LAYERS_METHOD}(). Give the model one that returns, in order, the modules that its forward runs, "
            "or (function, *modules) for a function that uses several, such as "
            "[self.embedding, *self.blocks, (self.logits, self.norm, self.head)]."
        )
    if len(found) > 1:
        names = ", ".join(name or type(module).__name__ for name, module in found)
        raise TypeError(f"Several modules have a method {LAYERS_METHOD}(): {names}. Exactly one model can be cut.")
    name, module = found[0]
    if any(_compat.is_compiled(other) and _compat.original_of(other) is module for other in root.modules()):
        raise TypeError(
            f"{name or type(module).__name__} is compiled as a whole, but a pipeline runs its layers one by one; "
            "compile the layers instead, such as `for block in model.blocks: block.compile()`."
        )
    return name, module


def read_layers(module: nn.Module) -> list[Layer]:
    """The layers of `module`, in order.

    Raises:
        TypeError: for an entry that is neither a module nor ``(function, *modules)``.
    """
    return [_layer(item, place) for place, item in enumerate(getattr(module, LAYERS_METHOD)())]


def _layer(item: object, place: int) -> Layer:
    if isinstance(item, nn.Module):
        return Layer(item, (item,))
    if isinstance(item, tuple) and item and callable(item[0]) and all(isinstance(m, nn.Module) for m in item[1:]):
        return Layer(item[0], item[1:])
    raise TypeError(
        f"{LAYERS_METHOD}()[{place}] is {item!r}, which is neither a module nor a tuple (function, *modules) of a "
        "function and the modules that it uses."
    )


def first_layers(layers: Sequence[Layer], num_stages: int, split: Sequence[int] | None) -> tuple[int, ...]:
    """The index of the first layer of each stage.

    Args:
        layers: of the whole model.
        num_stages: how many contiguous parts.
        split: the first layer of each stage but the first; ``None`` balances parameters.

    Raises:
        ValueError: for fewer layers than stages, or a `split` that does not give `num_stages` parts.
    """
    if len(layers) < num_stages:
        raise ValueError(
            f"{LAYERS_METHOD}() has {len(layers)} layers, but {num_stages} pipeline stages need at least one each; use "
            "fewer stages, or list smaller layers."
        )
    if split is not None:
        _check_split(split, num_stages, len(layers))
        return (0, *split)
    return balanced([sum(parameter.numel() for parameter in layer.parameters()) for layer in layers], num_stages)


def _check_split(split: Sequence[int], num_stages: int, num_layers: int) -> None:
    bounds = [0, *split, num_layers]
    is_rising = all(before < after for before, after in pairwise(bounds))
    if len(split) != num_stages - 1 or not is_rising:
        raise ValueError(
            f"pipeline_split={list(split)} does not cut {num_layers} layers into {num_stages} stages: it needs "
            f"{num_stages - 1} rising indices from 1 to {num_layers - 1}, the first layer of each stage but the first."
        )


def balanced(weights: Sequence[int], num_parts: int) -> tuple[int, ...]:
    """First indices of contiguous, non-empty parts of `weights` whose largest sum is the smallest possible.

    Of several such cuts, the one whose first parts are the smallest. Cost: len(weights)^2 * num_parts additions.

    >>> balanced([8, 1, 1, 1, 1, 8], 2), balanced([1, 1, 1, 1, 1], 2)
    ((0, 3), (0, 2))
    """
    total = [0]
    for weight in weights:
        total.append(total[-1] + weight)
    # best[parts][start]: smallest largest sum of `parts` parts of weights[start:], and the end of the first of them.
    best = [{len(weights): (0, len(weights))}]
    for parts in range(1, num_parts + 1):
        row = {}
        for start in range(len(weights) - parts + 1):
            candidates: Iterable[tuple[int, int]] = (
                (max(total[end] - total[start], best[parts - 1][end][0]), end)
                for end in range(start + 1, len(weights) + 1)
                if end in best[parts - 1]
            )
            row[start] = min(candidates)
        best.append(row)
    bounds, start = [], 0
    for parts in range(num_parts, 0, -1):
        bounds.append(start)
        start = best[parts][start][1]
    return tuple(bounds)
