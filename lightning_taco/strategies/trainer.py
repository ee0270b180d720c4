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
from lightning.pytorch.strategies import ModelParallelStrategy, StrategyRegistry
from lightning.pytorch.utilities.types import STEP_OUTPUT
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_taco.activations import ActivationConfig, resolve_activations
from lightning_taco.config import CompressionConfig
from lightning_taco.data_parallel import DataParallelConfig
from lightning_taco.dtensor.session import CompressionSession
from lightning_taco.strategies import arguments, checkpoints, checks
from lightning_taco.strategies.activations import Activations
from lightning_taco.strategies.compression import Compression
from lightning_taco.strategies.data_parallel import DataParallel, devices_per_node
from lightning_taco.strategies.gradients import (
    clip_gradients_by_norm,
    clip_gradients_by_value,
    is_norm_right_in_torch,
)
from lightning_taco.strategies.weight_tying import preserve_tied_parameters

REPLACED_METHODS = ("configure_model", "log")  # of the LightningModule, while the strategy runs


class TacoTPStrategy(ModelParallelStrategy):
    """Tensor parallelism (and FSDP2 beside it) whose exchanges of intermediate tensors are compressed.

    Lightning's `ModelParallelStrategy` with compressed redistribution: the ``LightningModule`` parallelises itself in
    ``configure_model`` with DTensor, over ``self.device_mesh["tensor_parallel"]``, and needs no change.

    A checkpoint holds the state of the compression too, so that a run that is resumed with ``ckpt_path`` has the bits
    of one that was not broken. It loads under Lightning's own strategy, and the other way round.

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
        self._must_check_batch = True

    @property
    def session(self) -> CompressionSession | None:
        """The running compression; ``None`` before set-up, after teardown, and when it is off."""
        return self.compression.session

    @override
    def _configure_launcher(self) -> None:
        # The first moment at which the number of processes is known, and before any is started.
        sizes = (self._data_parallel_size, self._tensor_parallel_size)
        checks.check_processes(self.parallel_devices, *sizes, self.num_nodes)
        super()._configure_launcher()

    @override
    def setup_environment(self) -> None:
        # The first moment at which the callbacks are known: before the process group exists and the model is built.
        assert self.lightning_module is not None
        trainer: Any = self.lightning_module.trainer
        checks.check_callbacks(trainer.callbacks)
        checks.check_unified_package(trainer.datamodule, *trainer.loggers)
        self._keep_ties_in_configure_model(self.lightning_module)
        super().setup_environment()

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        assert self.model is not None
        with preserve_tied_parameters(self.model):
            _materialize_distributed_module(self.model, self.root_device)
        super().setup(trainer)
        self.lightning_module.__dict__.pop("configure_model", None)  # type: ignore[union-attr]
        self.compression.start(self.model, self.device_mesh, self.root_device)
        self.activations.start(self.model)
        self.data_parallel.start(self.model, self.device_mesh, devices_per_node(self.parallel_devices))
        self.data_parallel.attach_optimizers(self.optimizers)
        self._replace_log()
        self._must_check_batch = True

    @override
    def setup_precision_plugin(self) -> None:
        super().setup_precision_plugin()
        self._replace_clipping()

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        if self._must_check_batch:
            self._must_check_batch = False
            self.compression.check_first_batch(args, self.model)
        with self.compression.forward_scope(is_training=True), self.activations.scope():
            output = super().training_step(*args, **kwargs)
        self._show_progress()
        return output

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        with self.compression.forward_scope(is_training=False):
            return super().validation_step(*args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        with self.compression.forward_scope(is_training=False):
            return super().test_step(*args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.compression.forward_scope(is_training=False):
            return super().predict_step(*args, **kwargs)

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        self.activations.report_first_step()
        with self.compression.backward_scope():
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
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any = None) -> None:
        if checkpoints.CURRENT_WEIGHTS in checkpoint:
            checkpoints.prepare_averaged_weights(checkpoint, is_distributed=self._save_distributed_checkpoint)
        own_state = self.compression.state_dict()
        if own_state is not None:
            checkpoint[checkpoints.COMPRESSION_STATE] = own_state
        data_parallel_state = self.data_parallel.state_dict()
        if data_parallel_state is not None:
            checkpoint[checkpoints.DATA_PARALLEL_STATE] = data_parallel_state
        super().save_checkpoint(checkpoint, filepath, storage_options)

    @override
    def load_checkpoint(self, checkpoint_path: _PATH, weights_only: bool | None = None) -> dict[str, Any]:
        assert self.model is not None
        names = {checkpoints.saved_name(name): name for name in self.model.state_dict()}
        with checkpoints.without_wrappers(self.model):
            checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
            if "averaging_state" in checkpoint:
                path = Path(self.broadcast(checkpoint_path))
                checkpoints.add_averaged_weights(checkpoint, self.model, path, names)
        own_state = checkpoint.pop(checkpoints.COMPRESSION_STATE, None)
        if own_state is not None:
            self.compression.load_state_dict(own_state)
        self.data_parallel.load_state_dict(checkpoint.pop(checkpoints.DATA_PARALLEL_STATE, None))
        return checkpoint

    @override
    def teardown(self) -> None:
        was_on = self.compression.is_on
        self.compression.stop()
        self.activations.stop()
        self.data_parallel.stop()
        self._restore_clipping()
        if self.lightning_module is not None:
            for name in REPLACED_METHODS:
                self.lightning_module.__dict__.pop(name, None)
        if was_on:
            self.compression.print_end_table()
        self.activations.print_table()
        self.data_parallel.print_end_table()
        super().teardown()

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
            if any(isinstance(parameter, DTensor) for parameter in module.parameters()):
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
            if self.compression.config is None and is_norm_right_in_torch(parameters):
                stock_by_norm(optimizer, clip_val)  # off is off, to the last bit
            else:
                clip_gradients_by_norm(parameters, clip_val)

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
