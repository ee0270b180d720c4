"""`GradientNormMonitor`: gradient norms that agree with the unsharded model's, whatever the tensor-parallel size."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.wrappers import _FabricOptimizer
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_taco.callbacks.gradient_cosine import RngStates, cosine_with_exact, rng_states
from lightning_taco.callbacks.host import host_of, pipeline_of
from lightning_taco.callbacks.logging import log_now
from lightning_taco.callbacks.sampling import checked_every_n_steps, current_step
from lightning_taco.collectives import timing
from lightning_taco.strategies.gradients import gradient_norm, has_gradient


class GradientNormMonitor(Callback):
    """Logs the norm of the gradients before and after they are clipped, equal to the unsharded model's.

    Tags:

    =======================================  ===========================================================================
    ``gradient_norm``                        before clipping
    ``clipped_gradient_norm``                after clipping: what the optimizer has used
    ``gradient_norm/<parameter>``            before clipping, with ``per_parameter=True``
    ``layer_gradient_norm/<layer>``          before clipping, with ``per_layer=True``. A layer is an entry of a list of
                                             modules with all that is in it, such as ``model.blocks.3``; of parameters
                                             outside lists, the module that holds them
    ``gradient_cosine``                      between the compressed and the exact gradient of a batch, with
                                             ``cosine_every_n_steps``
    =======================================  ===========================================================================

    A Fabric script calls `attach` once after ``fabric.setup_module``, `start_step` before each forward, `compare` and
    `before_optimizer` after backward and before clipping, `end_step` after the optimizer step. With several optimizers,
    each logs the norm of its own parameters under the same tags.

    Args:
        every_n_steps: log every how many optimizer steps, whatever ``Trainer(log_every_n_steps)`` is.
        norm_type: order of the norm: 1, 2, ``math.inf`` (``.inf`` in YAML), or any number above 0.
        per_parameter: also log the norm of each parameter's gradient.
        per_layer: also log the norm of each layer's gradients.
        cosine_every_n_steps: every how many steps a batch is computed once more without compression, and the cosine
            logged; ``None`` for never. In a Trainer with automatic optimization; under accumulation, of the first
            batch of a step. The training has the same bits with and without it, as long as ``training_step`` changes
            nothing but gradients and buffers; what it counts or collects itself, metrics of torchmetrics included, it
            does twice for these batches.

    Raises:
        TypeError: for `cosine_every_n_steps` with a strategy other than `TacoTPStrategy`.
        ValueError: for numbers of steps below 1, a `norm_type` that is not above 0, or `cosine_every_n_steps` with
            manual optimization.

    Cost, on a step that logs: two passes over the gradients, two small all-reduces for each mesh axis, and a wait for
    the device. Of the cosine: a forward, a backward, and the memory of a second set of gradients.
    """

    def __init__(
        self,
        every_n_steps: int = 50,
        norm_type: float = 2.0,
        per_parameter: bool = False,
        per_layer: bool = False,
        cosine_every_n_steps: int | None = None,
    ) -> None:
        if isinstance(norm_type, bool) or not isinstance(norm_type, (int, float)) or not norm_type > 0:
            raise ValueError(f"norm_type={norm_type!r} is not the order of a norm; use 1, 2 or inf.")
        self.every_n_steps = checked_every_n_steps(every_n_steps)
        self.norm_type = norm_type
        self.per_parameter = per_parameter
        self.per_layer = per_layer
        self.cosine_every_n_steps = cosine_every_n_steps
        if cosine_every_n_steps is not None:
            checked_every_n_steps(cosine_every_n_steps, "cosine_every_n_steps")
        self._loop: pl.Trainer | Fabric | None = None
        self._after_step: RemovableHandle | None = None
        self._rng: RngStates | None = None
        self._repeat: Callable[[], None] | None = None

    def attach(self, loop: pl.Trainer | Fabric) -> None:
        """Log to the loggers of `loop`; with `cosine_every_n_steps`, its strategy must be `TacoTPStrategy`.

        Raises:
            TypeError: when it is not.
        """
        self._loop = loop
        self._forget()
        if self.cosine_every_n_steps is not None:
            host_of(loop, type(self).__name__)

    def start_step(self, step: int) -> None:
        """Remember the random numbers of a step whose batch is to be computed again."""
        self._rng = None
        if self.cosine_every_n_steps is not None and step % self.cosine_every_n_steps == 0:
            self._rng = rng_states()

    def compare(self, step: int, closure: Callable[[], object], module: nn.Module) -> float | None:
        """Log the cosine between the gradients and those of `closure`, run without compression.

        Gradients, buffers and random numbers are the same to the last bit afterwards.

        Args:
            step: as given to `start_step`.
            closure: the forward and the ``fabric.backward`` of the batch whose gradients, and no others, `module` has.
                All ranks call it.
            module: as ``fabric.setup_module`` has given it.

        Returns:
            The cosine, the same on all ranks; ``None`` in a step that does not measure.
        """
        rng, self._rng = self._rng, None
        if rng is None or self._loop is None:
            return None
        host = host_of(self._loop, type(self).__name__)
        cosine = cosine_with_exact(module, closure, host.compression, rng)
        host.log({"gradient_cosine": cosine}, step)
        return cosine

    def before_optimizer(self, step: int, optimizer: Optimizer, module: nn.Module) -> None:
        """Log the norms of the parameters of `optimizer`, and after its step those that it has used.

        Args:
            step: the number of the step.
            optimizer: whose parameters.
            module: that holds them, for their names.
        """
        self._remove_hook()  # of a step that a gradient scaler has skipped
        if step % self.every_n_steps:
            return
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        with timing.aside():
            self._log(self._norms(parameters, module), step)

        is_first = iter([True])

        def after_step(*_: Any) -> None:
            # A hook that removes itself would disturb torch, which is going through all of them.
            if next(is_first, False):
                # The gradients lie there, clipped, until they are set to zero.
                with timing.aside():
                    norm = gradient_norm(parameters, self.norm_type, pipeline=self._stages())
                    self._log({"clipped_gradient_norm": norm.item()}, step)

        if isinstance(optimizer, _FabricOptimizer):
            optimizer = optimizer.optimizer
        self._after_step = optimizer.register_step_post_hook(after_step)

    def end_step(self, step: int, loss: Any = None) -> None:
        """Forget what was remembered for this step."""
        self._forget()

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse what the cosine cannot be measured with, before any work is done."""
        self.attach(trainer)
        if self.cosine_every_n_steps is not None and pipeline_of(trainer) is not None:
            raise ValueError(
                f"cosine_every_n_steps={self.cosine_every_n_steps} computes a batch a second time by itself, which a "
                "pipeline cannot do between its steps; leave cosine_every_n_steps out."
            )
        if self.cosine_every_n_steps is not None and not pl_module.automatic_optimization:
            raise ValueError(
                f"cosine_every_n_steps={self.cosine_every_n_steps} needs automatic optimization, whose batches the "
                f"monitor can compute again, but {type(pl_module).__name__}.automatic_optimization is False; leave "
                "cosine_every_n_steps out."
            )

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """`start_step`, where the gradients will be those of this batch alone."""
        if batch_idx % trainer.accumulate_grad_batches == 0:
            self.start_step(current_step(trainer))
            if self._rng is not None:
                self._repeat = lambda: _forward_backward(trainer, pl_module, batch, batch_idx)

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """`compare` and `before_optimizer`."""
        step = current_step(trainer)
        self._compare_batch(step, pl_module)
        self.before_optimizer(step, optimizer, pl_module)

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        """`end_step`; and `compare`, after a batch that the optimizer has not stepped on yet."""
        step = current_step(trainer)
        self._compare_batch(step, pl_module)
        self.end_step(step)

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Leave no hook behind."""
        self._forget()

    def _compare_batch(self, step: int, module: nn.Module) -> None:
        repeat, self._repeat = self._repeat, None
        if repeat is not None:
            self.compare(step, repeat, module)

    def _norms(self, parameters: list[Tensor], module: nn.Module) -> dict[str, float]:
        pipeline = pipeline_of(self._loop)
        if not self.per_parameter and not self.per_layer:
            norm = gradient_norm(parameters, self.norm_type, pipeline=self._stages())
            return {"gradient_norm": norm.item()}
        norms = gradient_norm(parameters, self.norm_type, per_parameter=True).tolist()
        by_parameter = {
            id(parameter): norm for parameter, norm in zip(parameters, norms, strict=True) if has_gradient(parameter)
        }
        named = [(name, by_parameter[id(each)]) for name, each in module.named_parameters() if id(each) in by_parameter]
        if pipeline is not None:
            named = list(pipeline.gathered(dict(named)).items())
            norms = [norm for _, norm in named]
        values = {"gradient_norm": _together(norms, self.norm_type)}
        if self.per_parameter:
            values.update((f"gradient_norm/{name}", norm) for name, norm in named)
        if self.per_layer:
            layers: dict[str, list[float]] = {}
            for name, norm in named:
                layers.setdefault(layer_of(name), []).append(norm)
            for layer, parts in layers.items():
                values[f"layer_gradient_norm/{layer}"] = _together(parts, self.norm_type)
        return values

    def _stages(self) -> dist.ProcessGroup | None:
        """The ranks that hold the other parameters of the model."""
        pipeline = pipeline_of(self._loop)
        return None if pipeline is None else pipeline.group

    def _log(self, values: Mapping[str, float], step: int) -> None:
        if isinstance(self._loop, pl.Trainer):
            log_now(self._loop, values, step)
        elif self._loop is not None:
            self._loop.log_dict(dict(values), step=step)

    def _forget(self) -> None:
        self._rng, self._repeat = None, None
        self._remove_hook()

    def _remove_hook(self) -> None:
        if self._after_step is not None:
            self._after_step.remove()
            self._after_step = None


def layer_of(parameter: str) -> str:
    """The layer of a parameter by its name: up to the first number, else without the last part.

    Example:
        >>> layer_of("model.blocks.3.mlp.up.weight"), layer_of("model.head.weight"), layer_of("scale")
        ('model.blocks.3', 'model.head', 'root')
    """
    parts = parameter.split(".")
    end = next((place + 1 for place, part in enumerate(parts) if part.isdigit()), len(parts) - 1)
    return ".".join(parts[:end]) or "root"


def _together(norms: Iterable[float], order: float) -> float:
    """The norm of a vector whose parts have these `norms`."""
    norms = list(norms)
    if any(math.isnan(norm) for norm in norms):
        return math.nan  # which a maximum may lose
    return max(norms, default=0.0) if math.isinf(order) else sum(norm**order for norm in norms) ** (1 / order)


def _forward_backward(trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
    """What automatic optimization does with a batch, without its hooks and its log."""
    arguments = trainer.fit_loop.epoch_loop._build_kwargs(OrderedDict(), batch, batch_idx)
    with _silent(module):
        output = trainer.strategy.training_step(*arguments.values())
        loss = output["loss"] if isinstance(output, Mapping) else output
        assert isinstance(loss, Tensor)
        module.backward(loss)


@contextmanager
def _silent(module: pl.LightningModule) -> Iterator[None]:
    """``self.log`` does nothing: the batch has been logged already."""
    before = module.__dict__.get("log")
    module.__dict__["log"] = lambda *_, **__: None
    try:
        yield
    finally:
        if before is None:
            del module.__dict__["log"]
        else:
            module.__dict__["log"] = before
