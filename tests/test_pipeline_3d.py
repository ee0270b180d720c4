"""Tensor, pipeline and data parallelism together: a tiny GPT on 8 forked gloo ranks, against one process.

Its checkpoints fit every layout. The case of 16 ranks is slow, and runs only when it is asked for: `-m slow`.
"""

from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset

from examples.language_module import LanguageModule
from lightning_taco import CompressionConfig, DataParallelConfig, PipelineConfig, TacoTPStrategy
from lightning_taco.activations import ActivationConfig
from lightning_taco.callbacks import CompressionGuard, CompressionMonitor
from lightning_taco.data_parallel.settings import weight_differences
from lightning_taco.pipeline_parallel import agreement
from tests.lightning_models import (
    make_trainer,
    warm_lightning,  # noqa: F401  a fixture
)
from tests.ranks import run_forked

pytestmark = pytest.mark.usefixtures("warm_lightning")

VOCABULARY, LENGTH, BATCH = 48, 16, 16
EVERY_AXIS: dict[str, Any] = {
    "compression": CompressionConfig(min_bytes=0),
    "pipeline_compression": PipelineConfig(min_bytes=0),
    "data_parallel": DataParallelConfig(min_bytes=0, weights=weight_differences()),
}


class Pairs(Dataset[tuple[Tensor, Tensor]]):
    """Each even token comes twice, so that there is something to learn."""

    def __init__(self, num_samples: int) -> None:
        tokens = torch.randint(0, VOCABULARY, (num_samples, LENGTH + 1), generator=torch.Generator().manual_seed(5))
        tokens[:, 1::2] = tokens[:, 0:-1:2]
        self.tokens = tokens

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.tokens[index, :-1], self.tokens[index, 1:]


class Losses(L.Callback):
    """The loss of each step, of all samples of the step; ends the run after `num_steps`."""

    def __init__(self, num_steps: int) -> None:
        self.values: list[float] = []
        self.num_steps = num_steps

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, *_: Any) -> None:
        loss = outputs["loss"].detach().clone()
        mesh = getattr(trainer.strategy, "_device_mesh", None)
        if mesh is not None and mesh["data_parallel"].size() > 1:
            dist.all_reduce(loss, group=mesh["data_parallel"].get_group())
            loss /= mesh["data_parallel"].size()
        self.values.append(loss.item())
        trainer.should_stop = len(self.values) == self.num_steps


def tiny_gpt(**sizes: Any) -> LanguageModule:
    defaults: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "sequence_length": LENGTH,
        "num_layers": 3,
        "hidden_size": 32,
        "num_heads": 4,
        "lr": 0.01,
        "warmup_steps": 2,
    }
    return LanguageModule(**(defaults | sizes))


def fit(
    strategy: TacoTPStrategy | str,
    num_steps: int,
    *,
    sizes: dict[str, Any] | None = None,
    save_to: Path | None = None,
    **settings: Any,
) -> tuple[list[float], L.Trainer]:
    """The losses of `num_steps` steps of a run of 6, in epochs of 3 batches of 16 samples, the same at every layout."""
    copies = strategy._data_parallel_size if isinstance(strategy, TacoTPStrategy) else 1
    ranks = dist.get_world_size() if isinstance(strategy, TacoTPStrategy) else 1
    copy = dist.get_rank() // (ranks // copies)
    data = Pairs(BATCH * 3)
    mine = Subset(data, [index for index in range(len(data)) if index % copies == copy])
    losses = Losses(num_steps)
    callbacks = [losses, *settings.pop("callbacks", [])]
    path = settings.pop("ckpt_path", None)
    trainer = make_trainer(
        strategy, devices=ranks, max_epochs=2, gradient_clip_val=1.0, callbacks=callbacks, **settings
    )
    loader: DataLoader[Any] = DataLoader(mine, batch_size=BATCH // copies)  # type: ignore[arg-type]
    trainer.fit(tiny_gpt(**(sizes or {})), loader, ckpt_path=path)
    if save_to is not None:
        trainer.save_checkpoint(save_to)
    return losses.values, trainer


def layout(data: int, pipeline: int, tensor: int, **arguments: Any) -> TacoTPStrategy:
    return TacoTPStrategy(
        data_parallel_size=data,
        pipeline_parallel_size=pipeline,
        tensor_parallel_size=tensor,
        **({"compression": None, "num_microbatches": 4} | arguments),
    )


def test_eight_ranks_train_as_one_process_does() -> None:
    """To 1e-4 as they are; close with every axis compressed, whose sites say axis, stage and module."""
    expected = run_forked(1, lambda _: fit("auto", 3)[0])[0]

    def check(rank: int) -> tuple[list[float], list[float], set[str]]:
        plain, _ = fit(layout(2, 2, 2), 3)
        watchers = [CompressionMonitor(every_n_steps=1, num_exact_sites=1), CompressionGuard(every_n_steps=2)]
        compressed, trainer = fit(layout(2, 2, 2, **EVERY_AXIS), 3, callbacks=watchers)
        strategy = trainer.strategy
        assert isinstance(strategy, TacoTPStrategy)
        counts = strategy.pipeline.counts
        assert counts is not None
        for traffic in (strategy.compression.traffic, counts.sent, strategy.data_parallel.traffic):
            assert traffic.total(outcome="compressed").ratio > 3
        return plain, compressed, {name for name in trainer.callback_metrics if "relative_error/" in name}

    for plain, compressed, sites in run_forked(8, check, 240):
        torch.testing.assert_close(plain, expected, rtol=1e-5, atol=0)
        torch.testing.assert_close(compressed, expected, rtol=2e-3, atol=0)
        assert compressed != plain
        prefix = "compression/relative_error"
        assert {
            f"{prefix}/forward/pipeline_parallel/stage_0_to_1/model.blocks.0/send",
            f"{prefix}/backward/pipeline_parallel/stage_0_to_1/model.blocks.0/send",
            f"{prefix}/forward/tensor_parallel/stage_0/model.blocks.0.mlp.down/all_reduce",
            f"{prefix}/backward/tensor_parallel/stage_1/model.blocks.2.mlp/all_reduce",
        } <= sites, sites


def test_sequence_parallelism_recomputation_and_stored_activations_within_stages() -> None:
    """And loss parallelism, whose backward needs a context of its own, with schedules that cut finer."""
    sizes = {"sequence_parallel": True, "activation_checkpointing": True, "num_layers": 4}
    expected = run_forked(1, lambda _: fit("auto", 2, sizes={"num_layers": 4})[0])[0]

    def check(rank: int) -> list[list[float]]:
        split = {"shard_weights": False}
        found = [fit(layout(1, 2, 2, pipeline_schedule="Interleaved1F1B"), 2, sizes=sizes | split)[0]]
        loss_parallel = sizes | {"loss_parallel": True}
        found.append(fit(layout(1, 2, 2, pipeline_schedule="ZBVZeroBubble"), 2, sizes=loss_parallel | split)[0])
        stored = layout(1, 2, 2, activations=ActivationConfig(min_numel=1))
        found.append(fit(stored, 2, sizes={"num_layers": 4})[0])
        return found

    for losses in run_forked(4, check, 240):
        *exactly, stored = losses
        for exact in exactly:
            torch.testing.assert_close(exact, expected, rtol=1e-5, atol=0)
        torch.testing.assert_close(stored, expected, rtol=2e-2, atol=0)
        assert stored != exactly[0]


def test_accumulated_gradients_of_sharded_and_of_whole_weights() -> None:
    """Two batches a step: reduced by FSDP2, and by `data_parallel=` where each rank has whole weights."""
    settings = {"accumulate_grad_batches": 2}
    exactly = DataParallelConfig(min_bytes=1 << 30)
    expected = run_forked(1, lambda _: fit("auto", 4, **settings)[0])[0]

    def check(rank: int) -> list[list[float]]:
        whole = layout(2, 2, 1, data_parallel=exactly, pipeline_schedule="ZBVZeroBubble")
        return [
            fit(layout(2, 2, 1), 4, **settings)[0],
            fit(whole, 4, sizes={"shard_weights": False}, **settings)[0],
        ]

    for results in run_forked(4, check, 120):
        for losses in results:
            torch.testing.assert_close(losses, expected, rtol=1e-5, atol=0)


class Faulty(LanguageModule):
    """Its last block raises in the second batch, on some ranks."""

    def __init__(self, ranks: tuple[int, ...], **sizes: Any) -> None:
        super().__init__(**sizes)
        self.ranks = ranks

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        def fail(*_: Any) -> None:
            raise RuntimeError(f"a bad batch on rank {dist.get_rank()}")

        if batch_idx == 1 and dist.get_rank() in self.ranks:
            self.model.head.register_forward_pre_hook(fail)


def fit_faulty(ranks: tuple[int, ...]) -> str:
    """What ends the fit of a model that fails on `ranks`, the message of an exception."""
    module = Faulty(ranks, vocab_size=VOCABULARY, sequence_length=LENGTH, num_layers=2, hidden_size=32, num_heads=4)
    loader: DataLoader[Any] = DataLoader(Pairs(32), batch_size=16)
    try:
        make_trainer(layout(1, 2, 2)).fit(module, loader)
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def test_a_failure_of_all_ranks_of_a_stage_ends_every_rank_with_its_message() -> None:
    texts = run_forked(4, lambda _: fit_faulty((2, 3)), 60)
    assert [text.startswith("StageFailedError") for text in texts] == [True, True, False, False]
    assert ["a bad batch on rank 2" in text for text in texts] == [True, False, True, False]
    assert ["a bad batch on rank 3" in text for text in texts] == [False, True, False, True]


def test_fsdp_with_several_stages_a_rank_is_refused() -> None:
    def check(rank: int) -> str:
        with pytest.raises(ValueError, match="gives a rank several stages, but FSDP2 gathers one model") as caught:
            fit(layout(2, 2, 1, pipeline_schedule="Interleaved1F1B"), 1)
        return str(caught.value)

    assert all('use "1F1B" or "GPipe" with FSDP2' in text for text in run_forked(4, check, 60))


def test_a_failure_of_one_rank_of_a_stage_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends that rank, and so the others."""
    monkeypatch.setattr(agreement, "PEERS_TIMEOUT", timedelta(seconds=5))
    with pytest.raises(AssertionError, match="a bad batch on rank 3") as caught:
        run_forked(4, lambda _: _only(fit_faulty((3,))), 40)
    assert "killed after the time limit" not in str(caught.value), "no rank is left waiting"


def _only(text: str) -> None:
    raise RuntimeError(text)


def test_a_checkpoint_fits_every_layout(tmp_path: Path) -> None:
    """Data x pipeline x tensor, a folder and a file; losses go on as if unbroken."""
    expected = run_forked(1, lambda _: fit("auto", 6)[0])[0]
    ways = [((1, 2, 2), (2, 2, 1), True), ((2, 1, 2), (1, 2, 2), True), ((1, 2, 2), (2, 1, 2), False)]

    def check(rank: int) -> list[list[float]]:
        found = []
        for place, (first, second, is_folder) in enumerate(ways):
            path, save = tmp_path / str(place), {"save_distributed_checkpoint": is_folder}
            begun, _ = fit(layout(*first, **save), 3, save_to=path)
            ended, _ = fit(layout(*second, **save), 3, ckpt_path=path)
            assert path.is_dir() == is_folder
            found.append(begun + ended)
        return found

    for losses in run_forked(4, check, 240):
        for each in losses:
            torch.testing.assert_close(each, expected, rtol=2e-5, atol=0)


@pytest.mark.slow
def test_sixteen_ranks_train_save_and_resume_at_another_layout(tmp_path: Path) -> None:
    """TP=4, PP=2, DP=2, then TP=2, PP=2, DP=4, every axis compressed."""
    expected = run_forked(1, lambda _: fit("auto", 6)[0])[0]

    def check(rank: int) -> list[float]:
        begun, _ = fit(layout(2, 2, 4, **EVERY_AXIS), 3, save_to=tmp_path / "checkpoint")
        ended, _ = fit(layout(4, 2, 2, **EVERY_AXIS), 3, ckpt_path=tmp_path / "checkpoint")
        return begun + ended

    for losses in run_forked(16, check, 900):
        torch.testing.assert_close(losses, expected, rtol=5e-3, atol=0)
