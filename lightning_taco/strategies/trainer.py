"""`TacoTPStrategy` for ``lightning.pytorch.Trainer``."""

from __future__ import annotations

import functools
from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.fabric.strategies.model_parallel import _materialize_distributed_module
from lightning.fabric.utilities.rank_zero import rank_zero_info
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ModelParallelStrategy, StrategyRegistry
from lightning.pytorch.utilities.types import STEP_OUTPUT
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_taco.activations import ActivationConfig, resolve_activations
from lightning_taco.config import CompressionConfig
from lightning_taco.data_parallel import DataParallelConfig
from lightning_taco.dtensor.session import CompressionSession
from lightning_taco.pipeline_parallel import PipelineConfig, Schedule, cut_of
from lightning_taco.strategies import arguments, checkpoints, checks, pipeline_checkpoints
from lightning_taco.strategies.activations import Activations
from lightning_taco.strategies.compression import Compression
from lightning_taco.strategies.data_parallel import DataParallel, devices_per_node
from lightning_taco.strategies.gradients import (
    clip_gradients_by_norm,
    clip_gradients_by_value,
    is_norm_right_in_torch,
)
from lightning_taco.strategies.pipeline import Pipeline
from lightning_taco.strategies.pipeline_arguments import check_accumulation, checked_pipeline
from lightning_taco.strategies.report import print_axes_table
from lightning_taco.strategies.weight_tying import preserve_tied_parameters

REPLACED_METHODS = ("configure_model", "log")  # of the LightningModule, while the strategy runs


class TacoTPStrategy(ModelParallelStrategy):
    """Tensor parallelism (and FSDP2 beside it) whose exchanges of intermediate tensors are compressed.

    Lightning's `ModelParallelStrategy` with compressed redistribution: the ``LightningModule`` parallelises itself in
    ``configure_model`` with DTensor, over ``self.device_mesh["tensor_parallel"]``, and needs no change.

    A checkpoint holds the state of the compression too, so that a run that is resumed with ``ckpt_path`` has the bits
    of one that was not broken. It loads under Lightning's own strategy, and the other way round.

    With ``pipeline_parallel_size`` above 1 the model (the module, or one within it) has a method ``pipeline_layers()``
    that lists what its forward runs, one after another: modules, or ``(function, *modules)``. ``training_step`` and the
    others stay as they are, and call the model once, with positional arguments. They run on the ranks of the last stage
    for each micro-batch, where that call is answered by the pipeline. Up to that call they also run on the ranks of the
    first stage, with the same random numbers. What they return and log is averaged over micro-batches, on all ranks.

    Args:
        compression: a recipe name (``"default"``, ``"taco"``, ``"int8"``, ``"none"``), a `CompressionConfig`, or
            ``None``: off, and bit-equal to `ModelParallelStrategy`.
        data_parallel: what travels between data-parallel ranks: ``"sdp4bit"`` (gradients in 8 bits inside a node and 4
            between nodes, FSDP2's weights as 4-bit differences), ``"tlq_hs"`` (its gradients only), ``"quangrad"``
            (gradients kept and sent in FP8 blocks), a `DataParallelConfig`, or ``None``: off. When on, parameters that
            FSDP2 does not shard are averaged too, so plain data parallelism needs ``tensor_parallel_size=1`` only.
        data_parallel_size: ranks along the data-parallel axis; ``"auto"`` is the number of nodes.
        tensor_parallel_size: ranks along the tensor-parallel axis; ``"auto"`` is the number of devices of a node.
        sample_every_n_steps: every how many steps the reconstruction error is measured and shown; 0 for never.
        save_distributed_checkpoint: save a folder with a file per rank; ``False`` assembles one file on rank 0.
        process_group_backend: ``"nccl"``, ``"gloo"``; by default the one of the device.
        timeout: limit of a collective, seconds or a ``timedelta``.
        activations: how what backward needs is stored: ``"agoq"`` (4 bits a value), an `ActivationConfig`, or ``None``
            for stock autograd.
        pipeline_parallel_size: ranks along the pipeline axis, each with some of the model's layers; 1: no pipeline.
        pipeline_schedule: ``"1F1B"``, ``"GPipe"``, ``"LoopedBFS"``, ``"Interleaved1F1B"``, ``"InterleavedZeroBubble"``
            or ``"ZBVZeroBubble"``; the last four give each rank two stages or more.
        num_microbatches: into how many a batch is cut; ``None`` for two for each rank of the pipeline. A batch that is
            no multiple runs as fewer.
        pipeline_split: index of the first layer of each stage but the first; ``None`` balances parameters.
        pipeline_compression: what travels between stages: ``"tah_quant"``, ``"int8"``, ``"int4"``, a `PipelineConfig`,
            or ``None``: as it is.

    Raises:
        ValueError: for an unknown codec or recipe, or sizes whose product is not the number of processes.
        RuntimeError: under a torch whose redistribution is not known.

    Example::

        Trainer(accelerator="gpu", devices=2, strategy=TacoTPStrategy())
    """

    def __init__(
        self,
        compression: CompressionConfig | str | None = "default",
        data_parallel_size: Literal["auto"] | int = "auto",
        tensor_parallel_size: Literal["auto"] | int = "auto",
        sample_every_n_steps: int = 50,
        save_distributed_checkpoint: bool = True,
        process_group_backend: str | None = None,
        timeout: timedelta | float | None = default_pg_timeout,
        activations: ActivationConfig | str | None = None,
        data_parallel: DataParallelConfig | str | None = None,
        pipeline_parallel_size: int = 1,
        pipeline_schedule: Schedule = "1F1B",
        num_microbatches: int | None = None,
        pipeline_split: list[int] | None = None,
        pipeline_compression: PipelineConfig | str | None = None,
    ) -> None:
        super().__init__(
            data_parallel_size=data_parallel_size,
            tensor_parallel_size=tensor_parallel_size,
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend,
            timeout=arguments.checked_timeout(timeout),
        )
        self.compression = Compression(
            arguments.checked_compression(compression), arguments.checked_sampling(sample_every_n_steps)
        )
        self.activations = Activations(resolve_activations(activations))
        self.data_parallel = DataParallel(arguments.checked_data_parallel(data_parallel))
        stages = pipeline_parallel_size, pipeline_schedule, num_microbatches, pipeline_split, pipeline_compression
        self.pipeline = Pipeline(checked_pipeline(*stages), sample_every_n_steps)
        check_accumulation(self.pipeline.arguments, self.data_parallel.config)
        self._must_check_batch = True

    @property
    def session(self) -> CompressionSession | None:
        """The running compression; ``None`` before set-up, after teardown, and when it is off."""
        return self.compression.session

    @override
    def _configure_launcher(self) -> None:
        # The first moment at which the number of processes is known, and before any is started.
        sizes = (self._data_parallel_size, self._tensor_parallel_size)
        checks.check_processes(self.parallel_devices, *sizes, self.num_nodes, self.pipeline.arguments.size)
        super()._configure_launcher()

    @override
    def setup_environment(self) -> None:
        # The first moment at which the callbacks are known: before the process group exists and the model is built.
        assert self.lightning_module is not None
        trainer: Any = self.lightning_module.trainer
        checks.check_callbacks(trainer.callbacks)
        checks.check_unified_package(trainer.datamodule, *trainer.loggers)
        self._keep_ties_in_configure_model(self.lightning_module)
        if self.pipeline.is_on:
            checks.check_pipeline_callbacks(trainer.callbacks)
            self._setup_three_axes()
        else:
            super().setup_environment()

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        assert self.model is not None
        self.cut_for_pipeline(self.model)
        with preserve_tied_parameters(self.model):
            _materialize_distributed_module(self.model, self.root_device)
        super().setup(trainer)
        self.lightning_module.__dict__.pop("configure_model", None)  # type: ignore[union-attr]
        self.compression.start(self.model, self.device_mesh, self.root_device)
        self.activations.start(self.model)
        self.data_parallel.start(self.model, self.device_mesh, devices_per_node(self.parallel_devices))
        self.data_parallel.attach_optimizers(self.optimizers)
        self._replace_log()
        assert self.lightning_module is not None
        self.pipeline.start(self.lightning_module, self.device_mesh, self.compression, self.activations)
        self._must_check_batch = True

    def cut_for_pipeline(self, model: nn.Module) -> nn.Module:
        """Leave in `model`, in place, the layers of this rank's pipeline stages; without a pipeline it stays as it is.

        ``configure_model`` may call it before it gives weights to a model on ``meta``, so that none are made for other
        stages, and has to call it before FSDP2 is applied. Otherwise it happens by itself, after ``configure_model``.

        Args:
            model: the one with ``pipeline_layers()``, or what holds it.

        Returns:
            `model`.

        Raises:
            TypeError: for a model without ``pipeline_layers``.
            ValueError: for one that cannot be cut, such as for tied weights in different stages.
        """
        self.pipeline.cut(model)
        return model

    @override
    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        assert self.lightning_module is not None
        with self.pipeline.something_to_train(self.lightning_module):
            super().setup_optimizers(trainer)
        self.pipeline.check_optimizers(self.optimizers)

    @override
    def setup_precision_plugin(self) -> None:
        super().setup_precision_plugin()
        self._replace_clipping()

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        if self._must_check_batch:
            self._must_check_batch = False
            self.compression.check_first_batch(args, self.model)
        if self.pipeline.is_on:
            output = self._train_through_pipeline(args, kwargs)
        else:
            with self.compression.forward_scope(is_training=True), self.activations.scope():
                output = super().training_step(*args, **kwargs)
        self._show_progress()
        return output

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        with self.compression.forward_scope(is_training=False):
            if self.pipeline.is_on:
                with self.precision_plugin.val_step_context():
                    return self.pipeline.evaluate("validation_step", args, kwargs)
            return super().validation_step(*args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        with self.compression.forward_scope(is_training=False):
            if self.pipeline.is_on:
                with self.precision_plugin.test_step_context():
                    return self.pipeline.evaluate("test_step", args, kwargs)
            return super().test_step(*args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.compression.forward_scope(is_training=False):
            if self.pipeline.is_on:
                with self.precision_plugin.predict_step_context():
                    return self.pipeline.evaluate("predict_step", args, kwargs)
            return super().predict_step(*args, **kwargs)

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        self.activations.report_first_step()
        with self.compression.backward_scope():
            if self.pipeline.is_on:
                loss = self._hooks_of_backward(closure_loss)
            else:
                loss = super().backward(closure_loss, optimizer, *args, **kwargs)
        self.data_parallel.finish_backward()
        return loss

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator[None, None, None]:
        with super().block_backward_sync(), self.data_parallel.no_sync():
            yield

    @override
    def reduce(self, tensor: Tensor | Any, group: Any = None, reduce_op: Any = "mean") -> Tensor:
        # A DTensor loss that is logged with sync_dist: c10d knows plain tensors only.
        if isinstance(tensor, DTensor):
            tensor = tensor.full_tensor()
        return super().reduce(tensor, group, reduce_op)

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        if not self.pipeline.is_on or self._save_distributed_checkpoint:
            return super().lightning_module_state_dict()
        assert self.model is not None
        return pipeline_checkpoints.whole_weights(self.model, self.pipeline.agreement, self.is_global_zero)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if not self.pipeline.is_on:
            return super().optimizer_state(optimizer)
        optimizer = optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        agreement = self.pipeline.agreement
        if self._save_distributed_checkpoint:
            return pipeline_checkpoints.with_groups_of_all_stages(super().optimizer_state(optimizer), agreement)
        assert self.model is not None
        return pipeline_checkpoints.whole_optimizer_state(self.model, optimizer, agreement, self.is_global_zero)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any = None) -> None:
        if checkpoints.CURRENT_WEIGHTS in checkpoint:
            checkpoints.prepare_averaged_weights(checkpoint, is_distributed=self._save_distributed_checkpoint)
        own_state = self.compression.state_dict()
        if own_state is not None:
            checkpoint[checkpoints.COMPRESSION_STATE] = own_state
        data_parallel_state = self.data_parallel.state_dict()
        if data_parallel_state is not None:
            checkpoint[checkpoints.DATA_PARALLEL_STATE] = data_parallel_state
        pipeline_state = self.pipeline.state_dict()
        if pipeline_state is not None:
            checkpoint[checkpoints.PIPELINE_STATE] = pipeline_state
        super().save_checkpoint(checkpoint, filepath, storage_options)

    @override
    def load_checkpoint(self, checkpoint_path: _PATH, weights_only: bool | None = None) -> dict[str, Any]:
        assert self.model is not None
        names = {checkpoints.saved_name(name): name for name in self.model.state_dict()}
        with checkpoints.without_wrappers(self.model):
            checkpoint = self._load(checkpoint_path, weights_only)
            if "averaging_state" in checkpoint:
                path = Path(self.broadcast(checkpoint_path))
                checkpoints.add_averaged_weights(checkpoint, self.model, path, names)
        own_state = checkpoint.pop(checkpoints.COMPRESSION_STATE, None)
        if own_state is not None:
            self.compression.load_state_dict(own_state)
        self.data_parallel.load_state_dict(checkpoint.pop(checkpoints.DATA_PARALLEL_STATE, None))
        self.pipeline.load_state_dict(checkpoint.pop(checkpoints.PIPELINE_STATE, None))
        return checkpoint

    @override
    def teardown(self) -> None:
        was_on = self.compression.is_on
        self.compression.stop()
        self.activations.stop()
        self.data_parallel.stop()
        self.pipeline.stop()
        self._restore_clipping()
        if self.lightning_module is not None:
            for name in REPLACED_METHODS:
                self.lightning_module.__dict__.pop(name, None)
        if was_on:
            self.compression.print_end_table()
        self.activations.print_table()
        self.data_parallel.print_end_table()
        self.pipeline.print_end_table()
        if self.pipeline.counts is not None:
            print_axes_table(self.compression.traffic, self.pipeline.counts.sent, self.data_parallel.traffic)
        super().teardown()

    def _setup_three_axes(self) -> None:
        """Lightning's `setup_environment`, with a third axis."""
        self._setup_distributed()
        assert self.lightning_module is not None
        stages = self.pipeline.arguments.size
        sizes = self._data_parallel_size, self._tensor_parallel_size
        data, tensor = checks.resolved_sizes(*sizes, self.world_size, self.num_nodes, stages)
        self._data_parallel_size, self._tensor_parallel_size = data, tensor
        names = ("data_parallel", "pipeline_parallel", "tensor_parallel")
        self._device_mesh = init_device_mesh(self.root_device.type, (data, stages, tensor), mesh_dim_names=names)
        self.lightning_module._device_mesh = self._device_mesh
        self.pipeline.join(self._device_mesh, self.root_device)

    def _train_through_pipeline(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> STEP_OUTPUT:
        """Forward and backward of all micro-batches."""
        with (
            self.compression.forward_scope(is_training=True),
            self.data_parallel.accumulating(),
            self.precision_plugin.train_step_context(),
        ):
            return self.pipeline.train(args, kwargs)

    def _hooks_of_backward(self, loss: Tensor) -> Tensor:
        """What Lightning does around a backward, which has run with the forward."""
        self.pre_backward(loss)
        assert self.lightning_module is not None
        loss = self.precision_plugin.pre_backward(loss, self.lightning_module)
        loss = self.precision_plugin.post_backward(loss, self.lightning_module)
        self.post_backward(loss)
        return loss

    def _load(self, checkpoint_path: _PATH, weights_only: bool | None) -> dict[str, Any]:
        if not self.pipeline.is_on:
            return super().load_checkpoint(checkpoint_path, weights_only)
        assert self.model is not None
        assert self.lightning_module is not None
        path, strict = Path(self.broadcast(checkpoint_path)), self.lightning_module.strict_loading
        return pipeline_checkpoints.load(path, self.model, self.optimizers, strict=strict, weights_only=weights_only)

    def _show_progress(self) -> None:
        """Compression ratio and relative error in the progress bar: what is lossy is visible."""
        module = self.lightning_module
        if not self.compression.is_on or module is None or module._current_fx_name != "training_step":
            return
        module.log("compression_ratio", self.compression.compression_ratio, prog_bar=True, logger=False, batch_size=1)
        error = self.compression.relative_l2_error
        if error is not None:
            module.log("relative_error", error, prog_bar=True, logger=False, batch_size=1)

    def _keep_ties_in_configure_model(self, module: pl.LightningModule) -> None:
        """Keep tied weights tied whoever calls ``configure_model``: Lightning, or a callback (WeightAveraging does).

        Lightning calls it once for each of fit, validate, test and predict, and torch refuses to parallelise twice.
        """
        configure_model = module.configure_model

        @functools.wraps(configure_model)
        def configure_with_ties() -> None:
            if cut_of(module) or any(isinstance(parameter, DTensor) for parameter in module.parameters()):
                rank_zero_info("lightning_taco: the model is parallelised already; configure_model is not called again")
                return
            with preserve_tied_parameters(module):
                configure_model()

        module.__dict__["configure_model"] = configure_with_ties

    def _replace_log(self) -> None:
        """Let ``self.log`` take DTensors, such as a loss under ``loss_parallel``.

        Lightning keeps a logged value as it is: a DTensor would end up in checkpoints (the best score of a
        ``ModelCheckpoint``), which then cannot be loaded elsewhere.
        """
        module = self.lightning_module
        assert module is not None
        log = module.log

        @functools.wraps(log)
        def log_plain(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
            log(name, apply_to_collection(value, DTensor, DTensor.full_tensor), *args, **kwargs)

        module.__dict__["log"] = log_plain

    def _replace_clipping(self) -> None:
        """Clip any mixture of DTensors and plain tensors, and partial gradients, where torch raises or is wrong."""
        plugin = self.precision_plugin
        stock_by_norm = functools.partial(type(plugin).clip_grad_by_norm, plugin)

        def by_norm(optimizer: Optimizer, clip_val: float) -> None:
            parameters = list(plugin.main_params(optimizer))
            is_off = self.compression.config is None and not self.pipeline.is_on
            if is_off and is_norm_right_in_torch(parameters):
                stock_by_norm(optimizer, clip_val)  # off is off, to the last bit
            else:
                clip_gradients_by_norm(parameters, clip_val, pipeline=self.pipeline.group)

        def by_value(optimizer: Optimizer, clip_val: float) -> None:
            clip_gradients_by_value(list(plugin.main_params(optimizer)), clip_val)

        plugin.__dict__["clip_grad_by_norm"] = by_norm
        plugin.__dict__["clip_grad_by_value"] = by_value

    def _restore_clipping(self) -> None:
        self.precision_plugin.__dict__.pop("clip_grad_by_norm", None)
        self.precision_plugin.__dict__.pop("clip_grad_by_value", None)


StrategyRegistry.register(
    "taco_tp",
    TacoTPStrategy,
    description="Tensor parallelism with compressed exchange of intermediate tensors.",
    override=True,
)
