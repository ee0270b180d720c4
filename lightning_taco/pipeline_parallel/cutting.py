"""Leaves of a model, on each pipeline rank, only the layers of its own stages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_taco.pipeline_parallel.layers import Layer, find_pipelined, first_layers, read_layers
from lightning_taco.pipeline_parallel.schedules import Layout

CUT = "_lightning_taco_cut"


class LayerOfAnotherStage(nn.Module):
    """Stands where a layer was that other pipeline ranks hold, so that the names of all others stay.

    Args:
        stage: which holds it.
    """

    def __init__(self, stage: int) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, *_: Any, **__: Any) -> None:
        """Refuse to run.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            f"A layer of pipeline stage {self.stage} was called on a rank of another stage: under a pipeline, a whole "
            "model runs only where training_step, validation_step, test_step or predict_step calls it."
        )


@dataclass(frozen=True)
class Cut:
    """How a model was cut.

    Attributes:
        layout: which stages there are, and on which ranks.
        rank: of the pipeline axis, whose stages are left.
        first_layers: the index of the first layer of each stage.
        names: of all parameters of the whole model, in its order.
    """

    layout: Layout
    rank: int
    first_layers: tuple[int, ...]
    names: tuple[str, ...]

    def layers_of(self, stage: int, layers: Sequence[Layer]) -> list[Layer]:
        """Those of `layers`, the whole model's, that belong to `stage`."""
        bounds = (*self.first_layers, len(layers))
        return list(layers[bounds[stage] : bounds[stage + 1]])


def cut_of(root: nn.Module) -> Cut | None:
    """How a module within `root` was cut, ``None`` if none was."""
    return next((module.__dict__[CUT] for module in root.modules() if CUT in module.__dict__), None)


def whole_names(root: nn.Module) -> list[str]:
    """Names of all parameters that `root` had before a model within it was cut, in their order."""
    prefix, module = find_pipelined(root)
    prefix = f"{prefix}." if prefix else ""
    names = [name for name, _ in root.named_parameters()]
    places = [place for place, name in enumerate(names) if name.startswith(prefix)]
    first, last = (places[0], places[-1] + 1) if places else (len(names), len(names))
    return [*names[:first], *(prefix + name for name in module.__dict__[CUT].names), *names[last:]]


def cut(root: nn.Module, layout: Layout, rank: int, split: Sequence[int] | None = None) -> Cut:
    """Keep in `root` only the layers that pipeline rank `rank` runs. A model that is cut already stays as it is.

    Args:
        root: the model, or what holds it.
        layout: the stages and their ranks.
        rank: this process's along the pipeline axis.
        split: the first layer of each stage but the first; ``None`` balances parameters.

    Raises:
        TypeError: for a model without ``pipeline_layers``.
        ValueError: for parameters in no layer, or in layers of several ranks, or a model that was cut differently.
    """
    _, module = find_pipelined(root)
    layers = read_layers(module)
    known = cut_of(root)
    if known is not None:
        _check_same(known, layout, rank)
        return known
    bounds = first_layers(layers, layout.num_stages, split)
    made = Cut(layout, rank, bounds, tuple(name for name, _ in module.named_parameters()))
    stages = [stage for stage in range(layout.num_stages) for _ in made.layers_of(stage, layers)]
    _check_parameters(module, layers, [layout.ranks[stage] for stage in stages])
    _check_not_sharded(module)
    _remove(module, layers, stages, layout.stages_of(rank))
    module.__dict__[CUT] = made
    return made


def _check_same(known: Cut, layout: Layout, rank: int) -> None:
    if (known.layout, known.rank) != (layout, rank):
        raise ValueError(
            f"The model holds the stages {known.layout.stages_of(known.rank)} of {known.layout.num_stages} from a run "
            f"before, but this run needs {layout.stages_of(rank)} of {layout.num_stages}; build a new LightningModule, "
            "and resume from a checkpoint, which fits every layout."
        )


def _check_parameters(module: nn.Module, layers: Sequence[Layer], ranks: Sequence[int]) -> None:
    """Each parameter of `module` must lie in layers of exactly one rank."""
    owners: dict[int, set[int]] = {}
    for layer, rank in zip(layers, ranks, strict=True):
        for parameter in layer.parameters():
            owners.setdefault(id(parameter), set()).add(rank)
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    nowhere = [name for key, each in names.items() if key not in owners for name in each]
    if nowhere:
        raise ValueError(
            f"{', '.join(nowhere[:3])} of {type(module).__name__} {'is' if len(nowhere) == 1 else 'are'} in no layer "
            "of pipeline_layers(), so no stage would hold it; add the module that owns it, or (function, *modules)."
        )
    for key, each in names.items():
        if len(owners[key]) > 1:
            raise ValueError(
                f"{' and '.join(each)} are one parameter (tied weights), but lie in stages of different pipeline ranks "
                f"({', '.join(map(str, sorted(owners[key])))}), which would train them apart. Untie them, cut so that "
                'they lie on one rank, or use pipeline_schedule="ZBVZeroBubble", where one rank has the first and the '
                "last stage."
            )


def _check_not_sharded(module: nn.Module) -> None:
    if any(isinstance(child, FSDPModule) for child in module.modules()):
        raise ValueError(
            "FSDP2 was applied to the whole model, so its groups hold parameters of all stages. Call "
            "self.trainer.strategy.cut_for_pipeline(model) in configure_model, before fully_shard."
        )


def _remove(module: nn.Module, layers: Sequence[Layer], stages: Sequence[int], kept_stages: Sequence[int]) -> None:
    kept = {id(each) for layer, stage in zip(layers, stages, strict=True) if stage in kept_stages for each in layer[1]}
    gone = {
        id(each): stage
        for layer, stage in zip(layers, stages, strict=True)
        for each in layer.modules
        if stage not in kept_stages and id(each) not in kept
    }
    for parent, name, child in list(_children(module)):
        if id(child) in gone:
            parent._modules[name] = LayerOfAnotherStage(gone[id(child)])


def _children(module: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    for parent in module.modules():
        for name, child in parent._modules.items():
            if child is not None:
                yield parent, name, child
