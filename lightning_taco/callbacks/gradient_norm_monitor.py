"""`GradientNormMonitor`: gradient norms that agree with the unsharded model's, whatever the tensor-parallel size."""

from __future__ import annotations

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from torch.optim import Optimizer
from typing_extensions import override

from lightning_taco.callbacks.logging import log_now
from lightning_taco.strategies.gradients import gradient_norm, gradient_norms_by_parameter


class GradientNormMonitor(Callback):
    """Logs the norm of the gradients before they are clipped.

    Tags: ``gradient_norm`` and, with ``per_parameter=True``, ``gradient_norm/<parameter>``.

    Args:
        every_n_steps: log every how many optimizer steps, whatever ``Trainer(log_every_n_steps)`` is.
        norm_type: order of the norm: 1, 2, ``math.inf``, or any number above 0.
        per_parameter: also log the norm of each parameter's gradient.

    Raises:
        ValueError: for `every_n_steps` below 1, or a `norm_type` that is not above 0.

    Cost, on a step that logs: one pass over the gradients, one small all-reduce for each mesh axis, and a wait for the
    device.
    """

    def __init__(self, every_n_steps: int = 50, norm_type: float = 2.0, per_parameter: bool = False) -> None:
        if isinstance(every_n_steps, bool) or not isinstance(every_n_steps, int) or every_n_steps < 1:
            raise ValueError(f"every_n_steps={every_n_steps!r} is not a number of steps; use an integer from 1 up.")
        if isinstance(norm_type, bool) or not isinstance(norm_type, (int, float)) or not norm_type > 0:
            raise ValueError(f"norm_type={norm_type!r} is not the order of a norm; use 1, 2 or inf.")
        self.every_n_steps = every_n_steps
        self.norm_type = norm_type
        self.per_parameter = per_parameter

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Log the norms of the parameters of `optimizer`; the same on all ranks."""
        if trainer.global_step % self.every_n_steps:
            return
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        values = {"gradient_norm": gradient_norm(parameters, self.norm_type).item()}
        if self.per_parameter:
            mine = {id(parameter) for parameter in parameters}
            named = [(name, parameter) for name, parameter in pl_module.named_parameters() if id(parameter) in mine]
            norms = gradient_norms_by_parameter(named, self.norm_type)
            values.update((f"gradient_norm/{name}", norm.item()) for name, norm in norms.items())
        log_now(trainer, values)
