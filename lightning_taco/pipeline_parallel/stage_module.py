"""The module that a stage runs: some layers of a model, one after another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from lightning_taco.pipeline_parallel.layers import Layer


class StageModule(nn.Module):
    """Calls each layer with what the one before returned.

    It holds the layers' modules beside the model that they belong to, whose names they keep.

    Args:
        layers: at least one.
    """

    def __init__(self, layers: Sequence[Layer]) -> None:
        super().__init__()
        self._functions = [layer.function for layer in layers]
        unique = {id(module): module for layer in layers for module in layer.modules}
        self.owned = nn.ModuleList(unique.values())

    def forward(self, *inputs: Any) -> Any:
        """Run the layers."""
        output: Any = inputs
        for function in self._functions:
            output = function(*output) if isinstance(output, (tuple, list)) else function(output)
        return output


def run_as_stage(model: nn.Module, stage: nn.Module, is_running: Callable[[], bool]) -> nn.Module:
    """`model`, whose forward is that of `stage` from now on: FSDP2 works in the hooks of the model that it shards.

    Raises:
        RuntimeError: from that forward, while no pipeline runs it.
    """

    def forward(*inputs: Any) -> Any:
        if not is_running():
            raise RuntimeError(
                f"{type(model).__name__} holds the layers of some pipeline stages on this rank, so it runs only where "
                "training_step, validation_step, test_step or predict_step calls it."
            )
        return stage.forward(*inputs)

    model.__dict__["forward"] = forward
    return model
