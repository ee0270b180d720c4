"""`TacoTPStrategy` for ``lightning.pytorch.Trainer``."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.fabric.strategies.model_parallel import _materialize_distributed_module
from lightning.pytorch.strategies import ModelParallelStrategy, StrategyRegistry
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_taco.config import CompressionConfig
from lightning_taco.dtensor.session import CompressionSession
from lightning_taco.strategies import arguments, checks
from lightning_taco.strategies.compression import Compression
from lightning_taco.strategies.gradients import clip_gradients_by_norm, clip_gradients_by_value
from lightning_taco.strategies.weight_tying import preserve_tied_parameters


class TacoTPStrategy(ModelParallelStrategy):
    """Tensor parallelism (and FSDP2 beside it) whose exchanges of intermediate tensors are compressed.

    Lightning's `ModelParallelStrategy` with compressed redistribution: the ``LightningModule`` parallelises itself in
    ``configure_model`` with DTensor, over ``self.device_mesh["tensor_parallel"]``, and needs no change.

    Args:
        compression: a recipe name (``"default"``, ``"taco"``, ``"int8"``, ``"none"``), a `CompressionConfig`, or
            ``None``: off, and bit-equal to `ModelParallelStrategy`.
        data_parallel_size: ranks along the data-parallel axis; ``"auto"`` is the number of nodes.
        tensor_parallel_size: ranks along the tensor-parallel axis; ``"auto"`` is the number of devices of a node.
        sample_every_n_steps: every how many steps the reconstruction error is measured and shown; 0 for never.
        save_distributed_checkpoint: save a folder with a file per rank; ``False`` assembles one file on rank 0.
        process_group_backend: ``"nccl"``, ``"gloo"``; by default the one of the device.
        timeout: limit of a collective, seconds or a ``timedelta``.

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
        self._must_check_batch = True

    @property
    def session(self) -> CompressionSession | None:
        """The running compression; ``None`` before set-up, after teardown, and when it is off."""
        return self.compression.session

    @override
    def _configure_launcher(self) -> None:
        # The first moment at which the number of processes is known, and before any is started.
        assert self.parallel_devices is not None
        checks.check_accelerator(self.parallel_devices[0].type)
        checks.check_mesh_sizes(
            self._data_parallel_size,
            self._tensor_parallel_size,
            self.num_nodes * self.num_processes,
            num_nodes=self.num_nodes,
        )
        super()._configure_launcher()

    @contextmanager
    @override
    def model_sharded_context(self) -> Generator[None, None, None]:
        with preserve_tied_parameters(self.lightning_module), super().model_sharded_context():
            yield

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        checks.check_callbacks(trainer.callbacks)  # type: ignore[attr-defined]
        assert self.model is not None
        with preserve_tied_parameters(self.model):
            _materialize_distributed_module(self.model, self.root_device)
        super().setup(trainer)
        self.compression.start(self.model, self.device_mesh, self.root_device)
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
        with self.compression.forward_scope(is_training=True):
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
        with self.compression.backward_scope():
            return super().backward(closure_loss, optimizer, *args, **kwargs)

    @override
    def reduce(self, tensor: Tensor | Any, group: Any = None, reduce_op: Any = "mean") -> Tensor:
        # A DTensor loss that is logged with sync_dist: c10d knows plain tensors only.
        if isinstance(tensor, DTensor):
            tensor = tensor.full_tensor()
        return super().reduce(tensor, group, reduce_op)

    @override
    def teardown(self) -> None:
        was_on = self.compression.is_on
        self.compression.stop()
        self._restore_clipping()
        if was_on:
            self.compression.print_end_table()
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

    def _replace_clipping(self) -> None:
        """Clip with norms that are right for any mixture of DTensors and plain tensors, where Lightning's raise."""
        plugin = self.precision_plugin

        def by_norm(optimizer: Optimizer, clip_val: float) -> None:
            clip_gradients_by_norm(list(plugin.main_params(optimizer)), clip_val)

        def by_value(optimizer: Optimizer, clip_val: float) -> None:
            clip_gradients_by_value(list(plugin.main_params(optimizer)), clip_val)

        if self.compression.config is not None or (
            self.model is not None and checks.mixes_dtensors_and_tensors(self.model.parameters())
        ):
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
