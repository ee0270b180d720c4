"""A LightningModule that trains the example models, on one device or on a device mesh."""

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import parallel as tensor_parallel
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from examples import gpt, llama
from examples.plans import materialize, next_token_loss, shard_data_parallel
from lightning_taco import TacoTPStrategy

FINAL_LR_FRACTION = 0.1  # where the cosine ends


class LanguageModule(pl.LightningModule):
    """Next-token training of a GPT or a LLaMA.

    Args:
        model: which of the two.
        preset: its sizes by name: `tiny`, `350M`, `2.7B`, `6.7B`, `13B` for `gpt`; `tiny`, `1B`, `8B` for `llama`.
        vocab_size: replaces the preset's, as do the sizes that follow when they are given.
        sequence_length: longest input, in tokens.
        num_layers: number of blocks.
        hidden_size: width of the residual stream.
        num_heads: attention heads.
        num_kv_heads: key/value heads, `llama` only.
        ffn_size: width of the feed-forward layer.
        tie_embeddings: use one matrix as token embedding and as head.
        sequence_parallel: split the residual stream along the sequence between tensor-parallel ranks.
        loss_parallel: compute the loss on logits that stay split over the vocabulary.
        lr: highest learning rate, reached after the warm-up; a cosine then takes it to a tenth at the last step.
        weight_decay: of the matrices; biases and norm weights have none.
        warmup_steps: optimizer steps over which the learning rate grows from 0.
        activation_checkpointing: recompute each block in backward instead of keeping its activations.
        shard_weights: shard weights over data-parallel ranks by FSDP2; without it each rank holds them all, and their
            gradients are averaged by ``TacoTPStrategy(data_parallel=...)`` only.
        compile: run each block through `torch.compile`.
        seed: of the initial weights, which are the same at every tensor-parallel size.

    Raises:
        ValueError: an unknown preset, sizes that do not fit each other, or data that does not fit the model.
    """

    def __init__(
        self,
        model: Literal["gpt", "llama"] = "gpt",
        preset: str = "tiny",
        vocab_size: int | None = None,
        sequence_length: int | None = None,
        num_layers: int | None = None,
        hidden_size: int | None = None,
        num_heads: int | None = None,
        num_kv_heads: int | None = None,
        ffn_size: int | None = None,
        tie_embeddings: bool | None = None,
        sequence_parallel: bool = False,
        loss_parallel: bool = False,
        lr: float = 3e-4,
        weight_decay: float = 0.1,
        warmup_steps: int = 100,
        activation_checkpointing: bool = False,
        shard_weights: bool = True,
        compile: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        overrides = {
            "vocab_size": vocab_size,
            "sequence_length": sequence_length,
            "num_layers": num_layers,
            "hidden_size": hidden_size,
            "num_heads": num_heads,
            "num_kv_heads": num_kv_heads,
            "ffn_size": ffn_size,
            "tie_embeddings": tie_embeddings,
            "activation_checkpointing": activation_checkpointing,
        }
        self.config = _config(model, preset, {name: v for name, v in overrides.items() if v is not None})
        self.sequence_parallel = sequence_parallel
        self.loss_parallel = loss_parallel
        self.lr = lr
        self.weight_decay = weight_decay
        self.warmup_steps = warmup_steps
        self.shard_weights = shard_weights
        self.compile_blocks = compile
        self.seed = seed
        self.model: gpt.GPT | llama.Llama | None = None

    def setup(self, stage: str) -> None:
        """Compare the data with the model before anything is built."""
        data = self.trainer.datamodule
        for name in ("vocab_size", "sequence_length"):
            given, limit = getattr(data, name, 0), getattr(self.config, name)
            if given > limit:
                raise ValueError(
                    f"The data module has {name}={given}, but the model only {name}={limit}: lower the former"
                    f" or raise the latter."
                )

    def configure_model(self) -> None:
        """Build the model and split it over the strategy's mesh, where there is one; later calls do nothing."""
        if self.model is not None:
            return
        mesh, device = self.device_mesh, self.trainer.strategy.root_device
        with torch.device("meta"):
            model = gpt.GPT(self.config) if isinstance(self.config, gpt.GPTConfig) else llama.Llama(self.config)
        if mesh is not None:
            self._parallelize(model, mesh["tensor_parallel"])
        if isinstance(self.trainer.strategy, TacoTPStrategy):
            self.trainer.strategy.cut_for_pipeline(model)  # before weights are made for layers of other stages
        materialize(model, device, self.seed)
        if mesh is not None and mesh["data_parallel"].size() > 1 and self.shard_weights:
            shard_data_parallel(model, mesh["data_parallel"])
        if self.compile_blocks:
            for block in model.blocks:
                block.compile()
        self.model = model

    def training_step(self, batch: tuple[Tensor, Tensor], batch_index: int) -> Tensor:
        loss = self._loss(batch)
        self.log("train_loss", loss.detach(), prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_index: int) -> None:
        self._log_evaluation("val_loss", batch)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_index: int) -> None:
        self._log_evaluation("test_loss", batch)

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_index: int) -> Tensor:
        """The most likely next token at each position, int64 [B, S]."""
        logits = self.model(batch[0])
        return (logits.full_tensor() if isinstance(logits, DTensor) else logits).argmax(dim=-1)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        with self._loss_context():
            super().backward(loss, *args, **kwargs)

    def configure_optimizers(self) -> dict[str, Any]:
        """AdamW with a linear warm-up and a cosine decay over the steps that the Trainer will take."""
        weights = [weight for weight in self.parameters() if weight.requires_grad]
        # On a pipeline rank one of them may be empty: schedulers and checkpoints need both everywhere.
        groups = [
            {"params": [weight for weight in weights if weight.dim() > 1], "weight_decay": self.weight_decay},
            {"params": [weight for weight in weights if weight.dim() <= 1], "weight_decay": 0.0},
        ]
        optimizer = AdamW(groups, lr=self.lr, betas=(0.9, 0.95))
        num_steps = int(self.trainer.estimated_stepping_batches)
        schedule = LambdaLR(optimizer, lambda step: lr_fraction(step, self.warmup_steps, num_steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, targets = batch
        with self._loss_context():
            return next_token_loss(self.model(inputs), targets)

    def _loss_context(self) -> AbstractContextManager[None]:
        split = self.model is not None and self.model.parallelism.loss_parallel
        return tensor_parallel.loss_parallel() if split else nullcontext()

    def _log_evaluation(self, name: str, batch: tuple[Tensor, Tensor]) -> None:
        # Ranks of one tensor-parallel group have the same loss already: only other data makes another mean.
        mesh = self.device_mesh
        group = None if mesh is None else mesh["data_parallel"].get_group()
        self.log(name, self._loss(batch), prog_bar=True, sync_dist=True, sync_dist_group=group)

    def _parallelize(self, model: gpt.GPT | llama.Llama, mesh: DeviceMesh) -> None:
        split = gpt.parallelize if isinstance(model, gpt.GPT) else llama.parallelize
        split(model, mesh, sequence_parallel=self.sequence_parallel, loss_parallel=self.loss_parallel)


def lr_fraction(step: int, warmup_steps: int, num_steps: int) -> float:
    """The learning rate at `step`, as a part of the highest one."""
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    progress = min(1.0, (step - warmup_steps) / max(1, num_steps - warmup_steps))
    return FINAL_LR_FRACTION + (1 - FINAL_LR_FRACTION) * 0.5 * (1 + math.cos(math.pi * progress))


def _config(model: str, preset: str, overrides: dict[str, Any]) -> gpt.GPTConfig | llama.LlamaConfig:
    if model == "gpt":
        if "num_kv_heads" in overrides:
            raise ValueError(
                f"num_kv_heads={overrides['num_kv_heads']} was given, but model='gpt' has one key/value head per"
                f" head: leave it out, or choose model='llama'."
            )
        return gpt.GPTConfig.preset(preset, **overrides)
    return llama.LlamaConfig.preset(preset, **overrides)
