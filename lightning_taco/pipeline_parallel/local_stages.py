"""The stages of one rank: the modules that run them, and what they are called."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_taco.pipeline_parallel.cutting import cut_of
from lightning_taco.pipeline_parallel.layers import Layer, find_pipelined, read_layers
from lightning_taco.pipeline_parallel.stage_module import StageModule, run_as_stage


class LocalStages:
    """What is left of a model that was cut.

    Args:
        root: the model, or what holds it; see `cutting.cut`.

    Attributes:
        module: the model.
        cut: how it was cut.
        modules: of this rank's stages, by their numbers.
    """

    def __init__(self, root: nn.Module) -> None:
        found = cut_of(root)
        assert found is not None, "the model is cut before its stages are run"
        self.root, self.cut = root, found
        self._name, self.module = find_pipelined(root)
        self._is_running = False
        self.modules = self._stage_modules()

    @contextmanager
    def running(self) -> Iterator[None]:
        """While stages may be called."""
        self._is_running = True
        try:
            with warnings.catch_warnings():
                # A stage ends with a block, whose output FSDP2 has made a view; nothing changes it in place.
                warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
                yield
        finally:
            self._is_running = False

    def close(self) -> None:
        """Undo what was put in place."""
        self.module.__dict__.pop("forward", None)

    def border(self, stage: int) -> str:
        """Name of the border behind `stage`: the stages, and the last module before it."""
        last = self._layers(stage)[-1].modules
        name = self._names().get(id(last[-1]), self._name) if last else self._name
        return f"stage_{stage}_to_{stage + 1}/{name}"

    def stage_of(self, path: str) -> int:
        """The stage, of those of this rank, that holds the module at `path` or around it."""
        names = self._names()
        for stage in self.modules:
            owned = [names[id(each)] for layer in self._layers(stage) for each in layer.modules if id(each) in names]
            if any(f"{path}.".startswith(f"{name}.") for name in owned):
                return stage
        return next(iter(self.modules))

    def _layers(self, stage: int) -> list[Layer]:
        return self.cut.layers_of(stage, read_layers(self.module))

    def _names(self) -> dict[int, str]:
        return {id(module): name for name, module in self.root.named_modules()}

    def _stage_modules(self) -> dict[int, nn.Module]:
        stages = self.cut.layout.stages_of(self.cut.rank)
        found: dict[int, nn.Module] = {stage: StageModule(self._layers(stage)) for stage in stages}
        if isinstance(self.module, FSDPModule):
            return {stage: run_as_stage(self.module, each, lambda: self._is_running) for stage, each in found.items()}
        return found
