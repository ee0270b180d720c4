"""`TacoTPStrategy` under a Trainer: what it compresses and says, what it leaves behind, what it must equal.

Ranks are forked processes (`run_forked`) and most tests run several fits in one fork: a fit costs about 0.3 s.
"""

import contextlib
import functools
import importlib
import io
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as stock_collectives
import torch.distributed.tensor.placement_types as placement_types
from lightning.pytorch.callbacks import Callback, StochasticWeightAveraging
from lightning.pytorch.strategies import ModelParallelStrategy, StrategyRegistry
from rich.console import Console
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.utils.data import DataLoader, RandomSampler

from lightning_taco import CodecConfig, CompressionConfig, TacoTPStrategy, _compat, dtensor
from lightning_taco.callbacks import GradientNormMonitor
from lightning_taco.dtensor.session import COMPRESSED
from lightning_taco.strategies import report
from lightning_taco.strategies.gradients import PARTIAL_NORM_TORCH
from tests.lightning_models import (
    TinyLm,
    TinyModule,
    apply_tiny_plan,
    captured_messages,
    full,
    full_weights,
    make_trainer,
    tiny_dataloader,
    warm_lightning,  # noqa: F401  a fixture
)
from tests.ranks import run_forked

pytestmark = pytest.mark.usefixtures("warm_lightning")
EVERYTHING = CompressionConfig(min_bytes=0)
SGD: Callable[[Any], torch.optim.Optimizer] = functools.partial(torch.optim.SGD, lr=0.5, foreach=False)
PLANS: tuple[dict[str, Any], ...] = ({}, {"sequence_parallel": True})
SHORT: dict[str, Any] = {"limit_train_batches": 2, "limit_val_batches": 0}
PRECISIONS = ("32-true", "bf16-mixed", "bf16-true", "16-true")


class Outcome(NamedTuple):
    """What a fit left."""

    weights: dict[str, Tensor]
    losses: list[float]
    validation_losses: list[float]
    trainer: L.Trainer


def compressing(**settings: Any) -> TacoTPStrategy:
    """A strategy that compresses whatever it may."""
    return TacoTPStrategy(compression=EVERYTHING, **settings)


def fit(
    module: TinyModule,
    strategy: ModelParallelStrategy | str | None = None,
    data: DataLoader[Tensor] | None = None,
    **settings: Any,
) -> Outcome:
    """Fit and validate `module` on the tiny data."""
    trainer = make_trainer(compressing() if strategy is None else strategy, **settings)
    trainer.fit(module, tiny_dataloader() if data is None else data, tiny_dataloader())
    return Outcome(full_weights(module), module.losses, module.validation_losses, trainer)


def num_compressed(strategy: Any) -> int:
    """Exchanges that were compressed since the last set-up."""
    assert isinstance(strategy, TacoTPStrategy)
    return strategy.compression.traffic.total(outcome=COMPRESSED).num_messages


def assert_same(first: Outcome, second: Outcome) -> None:
    """Both fits ended with the same bits and had the same losses on the way."""
    assert_equal_weights(first.weights, second.weights)
    assert first.losses == second.losses
    assert first.validation_losses == second.validation_losses


def assert_equal_weights(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    """The same names and bits."""
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


def distance(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    """Largest absolute difference of two sets of weights."""
    assert first.keys() == second.keys()
    return max((first[name] - second[name]).abs().max().item() for name in first)


def hook_counts(module: nn.Module) -> dict[str, int]:
    """Hooks of all kinds by module."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return {name: sum(len(getattr(child, kind)) for kind in kinds) for name, child in module.named_modules()}


def assert_nothing_left(module: TinyModule, hooks: dict[str, int], strategy: TacoTPStrategy) -> None:
    """No patched name, no hook, no clipping method."""
    assert not dtensor.is_installed()
    assert placement_types.funcol is stock_collectives
    assert hook_counts(module) == hooks
    assert not {"clip_grad_by_norm", "clip_grad_by_value"} & strategy.precision_plugin.__dict__.keys()
    assert "log" not in module.__dict__
    assert strategy.session is None


class HookCountingModule(TinyModule):
    """Counts its hooks once it is parallelised."""

    hooks: dict[str, int]

    def configure_model(self) -> None:
        if self.model is None:
            super().configure_model()
            self.hooks = hook_counts(self)


# --- what runs without an argument, and what it says


def test_strategy_says_what_the_first_step_compressed_or_why_nothing() -> None:
    def check(rank: int) -> list[list[str]]:
        with captured_messages() as without_argument:
            assert num_compressed(fit(TinyModule(), TacoTPStrategy()).trainer.strategy) == 0
        with captured_messages() as by_name:
            assert isinstance(fit(TinyModule(), "taco_tp").trainer.strategy, TacoTPStrategy)
        with captured_messages() as without_floor:
            strategy = fit(TinyModule()).trainer.strategy
        assert isinstance(strategy, TacoTPStrategy)
        assert num_compressed(strategy) == 2 * 4
        # fp32 against 8 bits a value and a 32-bit scale for each 128, up to the padding of a message
        assert strategy.compression.traffic.total(outcome=COMPRESSED).ratio == pytest.approx(32 / 8.25, rel=0.01)
        return [without_argument, by_name, without_floor]

    (without_argument, by_name, without_floor), on_another_rank = run_forked(2, check)
    # Four batches of one all-reduce in forward and one in backward: the first step has two.
    warning = "lightning_taco compressed nothing in the first step: 2 x smaller than min_bytes=1048576."
    assert without_argument.count(warning) == 1
    assert by_name.count(warning) == 1
    assert "lightning_taco: mesh data_parallel=1, tensor_parallel=2" in without_argument
    assert [text for text in without_floor if "first step" in text] == [
        "lightning_taco: first step: 2 of 2 exchanges compressed, 8.0 KiB sent as 2.1 KiB (3.88x)"
    ]
    assert not [text for texts in on_another_rank for text in texts if text.startswith("lightning_taco")]


def test_no_warning_on_one_tensor_parallel_rank() -> None:
    def check(rank: int) -> list[str]:
        with captured_messages() as texts:
            fit(TinyModule(), TacoTPStrategy())
        return [text for text in texts if "compressed nothing" in text]

    assert run_forked(1, check) == [[]]


def test_import_alone_registers_the_name() -> None:
    def check(rank: int) -> str:
        for name in [name for name in sys.modules if name.split(".")[0] == "lightning_taco"]:
            del sys.modules[name]
        del StrategyRegistry["taco_tp"]
        with pytest.raises(ValueError, match="taco_tp"):
            make_trainer("taco_tp")
        importlib.import_module("lightning_taco")
        return type(make_trainer("taco_tp").strategy).__name__

    assert run_forked(1, check) == ["TacoTPStrategy"]


# --- off is off


class SeamWatcher(Callback):
    """Fails when the seam is patched while training."""

    def on_train_batch_end(self, *_: Any) -> None:
        assert not dtensor.is_installed()
        assert placement_types.funcol is stock_collectives


def test_off_is_bit_equal_to_the_stock_strategy() -> None:
    def check(rank: int) -> None:
        for options in PLANS:
            stock = fit(TinyModule(**options), ModelParallelStrategy())
            off = fit(TinyModule(**options), TacoTPStrategy(compression=None), callbacks=[SeamWatcher()])
            assert_same(off, stock)
            assert len(off.losses) == len(off.validation_losses) == 4
            assert off.losses[-1] < off.losses[0]
            assert_same(fit(TinyModule(**options), TacoTPStrategy(compression="none")), stock)
            if options and _compat.torch_version() >= PARTIAL_NORM_TORCH:  # elsewhere stock clipping raises or is wrong
                clipped = fit(TinyModule(**options), ModelParallelStrategy(), gradient_clip_val=0.05)
                assert_same(fit(TinyModule(**options), TacoTPStrategy(None), gradient_clip_val=0.05), clipped)
            on = fit(TinyModule(**options))
            assert distance(on.weights, stock.weights) > 0
            assert on.losses == pytest.approx(stock.losses, rel=0.01)
            assert on.losses != stock.losses

    run_forked(2, check)


# --- precision


class DtypeWatcher(Callback):
    """Notes the dtypes of the parameters at the start of the fit, and of what the MLP returns."""

    parameter_dtypes: set[torch.dtype]

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.parameter_dtypes = {parameter.dtype for parameter in pl_module.parameters()}


def test_every_precision_trains_with_the_stock_parameter_dtypes() -> None:
    def check(rank: int) -> None:
        for precision in PRECISIONS:
            watcher, stock_watcher = DtypeWatcher(), DtypeWatcher()
            stock = fit(
                TinyModule(make_optimizer=SGD), ModelParallelStrategy(), precision=precision, callbacks=[stock_watcher]
            )
            compressed = fit(TinyModule(make_optimizer=SGD), precision=precision, callbacks=[watcher])
            expected = {"bf16-true": torch.bfloat16, "16-true": torch.float16}.get(precision, torch.float32)
            assert watcher.parameter_dtypes == stock_watcher.parameter_dtypes == {expected}
            assert num_compressed(compressed.trainer.strategy) == 8
            assert all(math.isfinite(loss) for loss in compressed.losses)
            assert compressed.losses == pytest.approx(stock.losses, rel=0.02)

    run_forked(2, check)


# --- accumulation, clipping, manual optimization


class ManualModule(TinyModule):
    """Two backward calls for each optimizer step."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_index: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        loss = self.loss(batch)
        self.losses.append(loss.item())
        self.manual_backward(loss / 2)
        if batch_index % 2:
            optimizer.step()
            optimizer.zero_grad()


class TwoLossesModule(TinyModule):
    """Two forwards and two backward calls in one training step, by hand."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_index: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        for half in batch.chunk(2):
            loss = self.loss(half)
            self.losses.append(loss.item())
            self.manual_backward(loss / 2)
        optimizer.step()
        optimizer.zero_grad()


def test_accumulation_equals_manual_optimization_and_the_whole_batch() -> None:
    def check(rank: int) -> None:
        accumulated = fit(TinyModule(make_optimizer=SGD), accumulate_grad_batches=2)
        manual = fit(ManualModule(make_optimizer=SGD))
        assert_same(accumulated, manual)
        assert num_compressed(manual.trainer.strategy) == num_compressed(accumulated.trainer.strategy) == 8
        two_losses = fit(TwoLossesModule(make_optimizer=SGD), data=tiny_dataloader(batch_size=8))
        assert_same(two_losses, manual)
        assert num_compressed(two_losses.trainer.strategy) == 8
        off = fit(TinyModule(make_optimizer=SGD), TacoTPStrategy(compression=None), accumulate_grad_batches=2)
        whole = fit(
            TinyModule(make_optimizer=SGD), TacoTPStrategy(compression=None), data=tiny_dataloader(batch_size=8)
        )
        assert distance(off.weights, accumulated.weights) > 0
        assert distance(off.weights, whole.weights) < 1e-6

    run_forked(2, check)


class ClippingWatcher(Callback):
    """Notes the largest gradient and the norm before each optimizer step, after clipping."""

    def __init__(self) -> None:
        self.norms: list[float] = []
        self.largest: list[float] = []

    def on_before_zero_grad(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        gradients = [full(parameter.grad) for parameter in pl_module.parameters() if parameter.grad is not None]
        if gradients:
            self.norms.append(torch.stack([gradient.norm() for gradient in gradients]).norm().item())
            self.largest.append(max(gradient.abs().max().item() for gradient in gradients))


CLIPPINGS = ((None, None), ("norm", 0.05), ("value", 1e-3))


@pytest.mark.parametrize("world_size", [2, 4])
def test_clipping_of_a_partly_parallel_model_equals_one_process(world_size: int) -> None:
    def settings(algorithm: str | None, value: float | None) -> dict[str, Any]:
        return {"gradient_clip_val": value, "gradient_clip_algorithm": algorithm, **SHORT}

    def one_process(rank: int) -> list[dict[str, Tensor]]:
        return [
            fit(TinyModule(parallelize=False, make_optimizer=SGD), "auto", **settings(*clipping)).weights
            for clipping in CLIPPINGS
        ]

    (expected,) = run_forked(1, one_process)
    for clipped in expected[1:]:
        assert distance(clipped, expected[0]) > 1e-3

    def check(rank: int) -> None:
        for clipping, weights in zip(CLIPPINGS, expected, strict=True):
            for options in PLANS:
                module = TinyModule(make_optimizer=SGD, **options)
                exact = fit(module, TacoTPStrategy(compression=None), **settings(*clipping))
                assert distance(exact.weights, weights) < 1e-6, (clipping, options)
        for algorithm, value in CLIPPINGS[1:] if world_size == 2 else ():
            watcher, module = ClippingWatcher(), HookCountingModule(make_optimizer=SGD)
            compressed = fit(module, callbacks=[watcher], **settings(algorithm, value))
            # Lightning zeroes gradients before the next step's backward: what is seen is what the step used.
            seen = watcher.norms if algorithm == "norm" else watcher.largest
            assert seen == pytest.approx([value] * len(seen), rel=1e-4)
            assert seen
            assert isinstance(compressed.trainer.strategy, TacoTPStrategy)
            assert_nothing_left(module, module.hooks, compressed.trainer.strategy)

    run_forked(world_size, check)


# --- evaluation, and the life of a Trainer


def test_evaluation_before_and_after_fit_is_exact_unless_asked() -> None:
    def evaluate(trainer: L.Trainer, module: TinyModule) -> list[Any]:
        data = tiny_dataloader()
        validated = trainer.validate(module, data, verbose=False)
        tested = trainer.test(module, data, verbose=False)
        predicted = trainer.predict(module, data)
        assert predicted is not None
        return [validated, tested, torch.cat([full(logits) for logits in predicted])]

    def check(rank: int) -> None:
        module, trainer = HookCountingModule(), make_trainer(compressing())
        watched = make_trainer(TacoTPStrategy(compression=CompressionConfig(min_bytes=0, during_validation=True)))
        for _ in range(2):
            ours = evaluate(trainer, module)
            assert num_compressed(trainer.strategy) == 0
            stock = evaluate(make_trainer(ModelParallelStrategy()), module)
            assert ours[:2] == stock[:2]
            assert torch.equal(ours[2], stock[2])
            lossy = evaluate(watched, module)
            assert num_compressed(watched.strategy) == 4
            assert not torch.equal(lossy[2], stock[2])
            assert torch.allclose(lossy[2], stock[2], atol=0.2)
            before = stock[0][0]["validation_loss"]
            trainer.fit(module, tiny_dataloader(), tiny_dataloader())
            assert num_compressed(trainer.strategy) == 8
            assert trainer.callback_metrics["validation_loss"].item() < before
            trainer.fit_loop.max_epochs = trainer.current_epoch + 1
            assert_nothing_left(module, module.hooks, trainer.strategy)  # type: ignore[arg-type]

    run_forked(2, check)


def test_second_fit_compresses_and_continues_bit_for_bit() -> None:
    def check(rank: int) -> None:
        # Plain SGD has no state, so two epochs in one fit are two fits of an epoch.
        unbroken = fit(TinyModule(make_optimizer=SGD), max_epochs=2)

        same_trainer, trainer = TinyModule(make_optimizer=SGD), make_trainer(compressing())
        trainer.fit(same_trainer, tiny_dataloader(), tiny_dataloader())
        trainer.fit_loop.max_epochs = 2
        trainer.fit(same_trainer, tiny_dataloader(), tiny_dataloader())
        assert num_compressed(trainer.strategy) == 8
        assert_equal_weights(full_weights(same_trainer), unbroken.weights)
        assert same_trainer.losses == unbroken.losses

        new_trainer = HookCountingModule(make_optimizer=SGD)
        fit(new_trainer)
        second = fit(new_trainer)
        assert num_compressed(second.trainer.strategy) == 8
        assert_same(second, unbroken)
        assert_nothing_left(new_trainer, new_trainer.hooks, second.trainer.strategy)  # type: ignore[arg-type]

    run_forked(2, check)


# --- nothing is left behind


class FailingModule(HookCountingModule):
    """Raises in the third training step, in forward or while gradients are computed."""

    def __init__(self, where: str, **options: Any) -> None:
        super().__init__(**options)
        self.where = where

    def training_step(self, batch: Tensor, batch_index: int) -> Tensor:
        loss = super().training_step(batch, batch_index)
        if batch_index == 2:
            if self.where == "backward":
                loss.register_hook(_raise)
            elif self.where == "interrupt":
                raise KeyboardInterrupt
            else:
                _raise(loss)
        return loss


def _raise(_: Tensor) -> None:
    raise ArithmeticError("step 2 fails on purpose")


def test_nothing_is_left_after_fit_and_after_an_exception() -> None:
    causes = (("forward", ArithmeticError), ("backward", ArithmeticError), ("interrupt", SystemExit))

    def check(rank: int) -> None:
        for options in PLANS:
            module, strategy = HookCountingModule(**options), compressing()
            assert not dtensor.is_installed()
            fit(module, strategy, gradient_clip_val=1.0)
            in_four_steps = num_compressed(strategy)
            assert_nothing_left(module, module.hooks, strategy)
            for where, error in causes:
                failing, failed = FailingModule(where, **options), compressing()
                with pytest.raises(error):
                    fit(failing, failed, gradient_clip_val=1.0)
                assert_nothing_left(failing, failing.hooks, failed)
                assert in_four_steps / 2 < num_compressed(failed) < in_four_steps
            # and the process is fit for another run
            again, strategy = HookCountingModule(**options), compressing()
            fit(again, strategy, gradient_clip_val=1.0)
            assert again.losses == module.losses
            assert num_compressed(strategy) == in_four_steps

    run_forked(2, check)


def test_strategy_whose_set_up_fails_leaves_nothing() -> None:
    class OddModule(HookCountingModule):
        """An MLP of 129 features, which two ranks cannot share."""

        def configure_model(self) -> None:
            if self.model is None:
                self.plan_backup, self.plan = self.plan, {}
                super().configure_model()
                assert self.model is not None
                assert self.device_mesh is not None
                self.model.mlp.up, self.model.mlp.down = nn.Linear(32, 129), nn.Linear(129, 32)
                torch.distributed.tensor.parallel.parallelize_module(
                    self.model, self.device_mesh["tensor_parallel"], self.plan_backup
                )
                self.hooks = hook_counts(self)

    def check(rank: int) -> None:
        module, strategy = OddModule(), compressing()
        with pytest.raises(ValueError, match=r"model\.mlp\.down takes 129 features.*tensor_parallel_size=2"):
            fit(module, strategy)
        assert_nothing_left(module, module.hooks, strategy)

    run_forked(2, check)


# --- refused before there is any work


def test_sizes_that_do_not_multiply_to_the_world_are_refused() -> None:
    with pytest.raises(ValueError, match=r"data_parallel_size=1 x tensor_parallel_size=3 needs 3 processes, but .* 2 "):
        L.Trainer(accelerator="cpu", devices=2, strategy=TacoTPStrategy(tensor_parallel_size=3))
    with pytest.raises(ValueError, match=r"Use data_parallel_size=2"):
        L.Trainer(accelerator="cpu", devices=4, strategy=TacoTPStrategy(data_parallel_size=4, tensor_parallel_size=2))


def test_other_accelerators_are_refused() -> None:
    strategy = TacoTPStrategy()
    strategy.parallel_devices = [torch.device("mps", 0)]
    with pytest.raises(ValueError, match=r"accelerator 'mps' is not supported: .*NCCL"):
        strategy._configure_launcher()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"compression": "tacos"}, r"'tacos'.*'taco'"),
        ({"compression": {"forward": {"block_size": 100}}}, r"block_size=100.*32, 64, 128, 256, 512"),
        ({"compression": {"forward": {"element": "e3m4"}}}, r"element='e3m4'.*'e4m3'.*'int8'"),
        ({"compression": {"min_byte": 0}}, r"min_byte"),
        ({"timeout": 0}, r"timeout=0 is not above zero"),
        ({"sample_every_n_steps": -1}, r"sample_every_n_steps=-1"),
    ],
)
def test_impossible_arguments_are_refused(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        TacoTPStrategy(**arguments)


def test_unknown_torch_is_refused_where_something_is_compressed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.14.0")
    with pytest.raises(RuntimeError, match=r"torch 2\.14\.0 is installed.*torch 2\.11 to 2\.13.*'torch>=2\.11,<2\.14'"):
        TacoTPStrategy()
    assert TacoTPStrategy(compression=None).session is None


def test_callbacks_that_cannot_work_are_refused_before_the_model_is_built() -> None:
    other_package = type("OtherPackageCallback", (Callback,), {"__module__": "pytorch_lightning.callbacks.base"})

    other_data = type("OtherData", (L.LightningDataModule,), {"__module__": "pytorch_lightning.core"})

    def check(rank: int) -> None:
        for callback, error, text in (
            (StochasticWeightAveraging(1e-2), ValueError, "use lightning.pytorch.callbacks.EMAWeightAveraging instead"),
            (other_package(), TypeError, "from lightning.pytorch import OtherPackageCallback"),
        ):
            module = TinyModule()
            with pytest.raises(error, match=text):
                fit(module, TacoTPStrategy(), callbacks=[callback])
            assert module.model is None

        class ConfiguringModule(TinyModule):
            def configure_callbacks(self) -> list[Callback]:
                return [StochasticWeightAveraging(1e-2)]

        with pytest.raises(ValueError, match="StochasticWeightAveraging copies plain tensors"):
            fit(ConfiguringModule(), TacoTPStrategy())
        with pytest.raises(
            TypeError, match=r"pytorch_lightning\.core\.OtherData belongs to the package pytorch_lightning"
        ):
            make_trainer(TacoTPStrategy()).fit(TinyModule(), datamodule=other_data())

    run_forked(2, check)


# --- the data of a tensor-parallel group


def test_different_batches_in_a_tensor_parallel_group_are_refused_on_every_rank() -> None:
    text = r"got different ones: \[0\] / \[1\]\. .*distributed_sampler_kwargs"

    def tokens(seed: int) -> DataLoader[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return DataLoader(torch.randint(0, 48, (16, 8), generator=generator), batch_size=4)  # type: ignore[arg-type]

    def check(rank: int) -> None:
        for data in (
            tokens(seed=rank),
            # a custom sampler that shuffles on each rank by itself
            DataLoader(
                tiny_dataloader().dataset,
                batch_size=4,
                sampler=RandomSampler(range(16), generator=torch.Generator().manual_seed(rank)),
            ),
        ):
            for strategy in (compressing(), TacoTPStrategy(compression=None)):
                with pytest.raises(ValueError, match=text):
                    fit(TinyModule(), strategy, data=data)

    run_forked(2, check)


class SamplingModule(TinyModule):
    """Makes its own sampler out of what the strategy says, as the message of the check above tells."""

    def train_dataloader(self) -> DataLoader[Tensor]:
        dataset = tiny_dataloader(num_samples=32).dataset
        strategy: Any = self.trainer.strategy
        numbers = strategy.distributed_sampler_kwargs
        sampler: Any = torch.utils.data.DistributedSampler(dataset, shuffle=True, seed=5, **numbers)  # type: ignore[arg-type]
        return DataLoader(dataset, batch_size=4, sampler=sampler)


def test_custom_sampler_by_the_strategys_numbers_shards_over_data_parallel_ranks_only() -> None:
    class Batches(Callback):
        def __init__(self) -> None:
            self.seen: list[Any] = []

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Tensor, batch_idx: int) -> None:
            self.seen.append(batch.tolist())

    def check(rank: int) -> tuple[list[Any], list[Any]]:
        custom, automatic = Batches(), Batches()
        trainer = make_trainer(compressing(data_parallel_size=2, tensor_parallel_size=2), callbacks=[custom])
        trainer.fit(SamplingModule(fsdp=True))
        strategy = compressing(data_parallel_size=2, tensor_parallel_size=2)
        fit(TinyModule(fsdp=True), strategy, callbacks=[automatic], use_distributed_sampler=True, limit_val_batches=0)
        return custom.seen, automatic.seen

    results = run_forked(4, check)
    for kind in range(2):
        first, second, third, fourth = (result[kind] for result in results)
        assert first == second
        assert third == fourth
        assert first != third
        assert len(first) in (2, 4)


# --- metrics


class DTensorLossModule(TinyModule):
    """Logs DTensors, as under ``loss_parallel``: a sum of which each rank holds a part, and the loss it returns."""

    def training_step(self, batch: Tensor, batch_index: int) -> Tensor:
        loss = self.loss(batch)
        self.losses.append(loss.item())
        assert self.device_mesh is not None
        mesh = self.device_mesh["tensor_parallel"]
        part = DTensor.from_local(loss.detach() * (self.trainer.global_rank + 1) / 3, mesh, [Partial()])
        whole = DTensor.from_local(loss, mesh, [Replicate()])
        self.log("step", part, prog_bar=True)
        self.log("synced", part, sync_dist=True)
        self.log("both", whole, on_step=True, on_epoch=True, sync_dist=True)
        self.log_dict({"epoch": part}, on_step=False, on_epoch=True, sync_dist=True)
        return whole


def test_dtensor_loss_is_logged_as_a_plain_number() -> None:
    def check(rank: int) -> dict[str, float]:
        module = DTensorLossModule()
        outcome = fit(module)
        metrics = outcome.trainer.callback_metrics
        assert {type(value) for value in metrics.values()} == {Tensor}
        for name in ("step", "synced", "both_step"):
            assert metrics[name].item() == pytest.approx(outcome.losses[-1])
        for name in ("epoch", "both", "both_epoch"):
            assert metrics[name].item() == pytest.approx(sum(outcome.losses) / 4)
        assert outcome.trainer.progress_bar_metrics["step"] == pytest.approx(outcome.losses[-1])
        return {name: value.item() for name, value in metrics.items()}

    first, second = run_forked(2, check)
    assert first == second


class MetricsRecorder(Callback):
    """Keeps the progress bar's metrics and the logged ones after each batch."""

    def __init__(self) -> None:
        self.shown: list[dict[str, Any]] = []
        self.logged: set[str] = set()

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.shown.append(dict(trainer.progress_bar_metrics))
        self.logged |= set(trainer.logged_metrics)


@pytest.mark.parametrize("world_size", [2, 3])
def test_progress_bar_shows_ratio_and_error_alike_on_all_ranks(world_size: int) -> None:
    def check(rank: int) -> list[dict[str, Any]]:
        shown = []
        for module, sampling in ((TinyModule(vocabulary_parallel=world_size == 2), 2), (TinyModule(), 0)):
            recorder = MetricsRecorder()
            if world_size == 3:  # uneven shards: 128 features on 3 ranks do not work, 48 tokens of a vocabulary do
                module.plan = {key: value for key, value in module.plan.items() if key in ("embedding", "head")}
                module.plan |= TinyModule(vocabulary_parallel=True).plan
                module.plan.pop("mlp.up")
                module.plan.pop("mlp.down")
            fit(module, compressing(sample_every_n_steps=sampling), callbacks=[recorder])
            assert recorder.logged == {"loss"}
            shown.append(recorder.shown)
        sampled, unsampled = shown
        assert all(3 < metrics["compression_ratio"] < 4 for metrics in sampled[1:])
        # The first sample is read in the first backward, so it shows from the second step on.
        assert 0.001 < sampled[1]["relative_error"] < 0.1
        assert all("relative_error" not in metrics for metrics in unsampled)
        return [metrics for run in shown for metrics in run]

    first, *others = run_forked(world_size, check)
    assert all(other == first for other in others)


# --- activation checkpointing, FSDP2


def test_activation_checkpointing_gives_the_same_bits() -> None:
    def check(rank: int) -> None:
        for options in PLANS:
            plain = fit(TinyModule(**options), limit_train_batches=3)
            checkpointed = fit(TinyModule(checkpointing=True, **options), limit_train_batches=3)
            assert_same(plain, checkpointed)
            # Each backward gathers the MLP's input once more; its last reduction is not needed again.
            num_repeated = 3 if options else 0
            assert (
                num_compressed(checkpointed.trainer.strategy) == num_compressed(plain.trainer.strategy) + num_repeated
            )

    run_forked(2, check)


def test_tensor_parallel_with_fsdp_compresses_the_tensor_parallel_axis_only() -> None:
    def tensor_parallel(rank: int) -> list[float]:
        return fit(TinyModule()).losses

    def check(rank: int) -> tuple[list[float], dict[str, Tensor], list[str]]:
        strategy = compressing(data_parallel_size=2, tensor_parallel_size=2)
        # The same batches on the data-parallel ranks, too: the losses are those of tensor parallelism alone.
        outcome = fit(TinyModule(fsdp=True), strategy)
        # 2 exchanges a step on the tensor-parallel axis, all of them compressed; FSDP2's are not ours to count
        assert num_compressed(strategy) == strategy.compression.traffic.total().num_messages == 8
        assert strategy.compression.group is not None
        assert dist.get_process_group_ranks(strategy.compression.group) == [rank // 2 * 2, rank // 2 * 2 + 1]
        stock = fit(
            TinyModule(fsdp=True),
            ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=2),
        )
        off = fit(
            TinyModule(fsdp=True),
            TacoTPStrategy(None, data_parallel_size=2, tensor_parallel_size=2),
        )
        assert_same(off, stock)
        return outcome.losses, outcome.weights, []

    (expected, _) = run_forked(2, tensor_parallel)
    results = run_forked(4, check)
    for losses, weights, _ in results:
        assert losses == pytest.approx(expected, rel=1e-5)
        assert_equal_weights(weights, results[0][1])


# --- one rank fails alone


class FailsOnOneRank(TinyModule):
    def training_step(self, batch: Tensor, batch_index: int) -> Tensor:
        if batch_index == 2 and self.trainer.global_rank == 1:
            raise ArithmeticError("the loss of rank 1 is not a number")
        return super().training_step(batch, batch_index)


def test_failure_on_one_rank_ends_all_ranks_at_once_and_is_named_first() -> None:
    start = time.monotonic()
    with pytest.raises(AssertionError) as caught:
        run_forked(2, lambda rank: fit(FailsOnOneRank(), compressing(timeout=60)) and None)
    assert time.monotonic() - start < 20
    first, _, second = str(caught.value).partition("rank 0:")
    assert first.startswith("rank 1:")
    assert "ArithmeticError: the loss of rank 1 is not a number" in first
    assert "onnection" in second


# --- gradient norms


NORM_TYPES = (1.0, 2.0, math.inf)


class NormRecorder(Callback):
    """Keeps what the GradientNormMonitor before it in the list of callbacks logs."""

    def __init__(self) -> None:
        self.norms: dict[str, list[float]] = {}

    def on_before_optimizer_step(self, trainer: L.Trainer, *_: Any) -> None:
        for name, value in trainer.callback_metrics.items():
            if name.startswith("gradient_norm"):
                self.norms.setdefault(name, []).append(value.item())


def recorded_norms(options: dict[str, Any]) -> dict[float, dict[str, list[float]]]:
    """Norms of two steps by norm type and name."""
    recorders = {norm_type: NormRecorder() for norm_type in NORM_TYPES}
    callbacks: list[Callback] = []
    for norm_type, recorder in recorders.items():
        callbacks += [GradientNormMonitor(every_n_steps=1, norm_type=norm_type, per_parameter=True), recorder]
    fit(TinyModule(**options), TacoTPStrategy(None), callbacks=callbacks, **SHORT)
    return {norm_type: recorder.norms for norm_type, recorder in recorders.items()}


def test_gradient_norms_equal_the_one_process_norms_at_every_size() -> None:
    def one_process(rank: int) -> list[dict[float, float]]:
        """By torch, on the gradients of a whole model."""
        steps: list[dict[float, float]] = []

        class TorchNorms(Callback):
            def on_before_optimizer_step(self, trainer: Any, pl_module: L.LightningModule, optimizer: Any) -> None:
                gradients = [parameter.grad for parameter in pl_module.parameters() if parameter.grad is not None]
                flat = torch.cat([gradient.flatten().double() for gradient in gradients])
                steps.append({norm_type: torch.linalg.vector_norm(flat, norm_type).item() for norm_type in NORM_TYPES})

        fit(TinyModule(parallelize=False), "auto", callbacks=[TorchNorms()], **SHORT)
        return steps

    def check(rank: int) -> list[dict[float, dict[str, list[float]]]]:
        return [recorded_norms({"sequence_parallel": parallel}) for parallel in (False, True)]

    (expected,) = run_forked(1, one_process)
    assert len(expected) == 2
    by_size = {world_size: run_forked(world_size, check) for world_size in (1, 2, 4)}
    for world_size, results in by_size.items():
        assert all(result == results[0] for result in results), "ranks differ"
        for norms, alone in zip(results[0], by_size[1][0], strict=True):
            for norm_type in NORM_TYPES:
                exact = [step[norm_type] for step in expected]
                assert norms[norm_type]["gradient_norm"] == pytest.approx(exact, rel=1e-5), (world_size, norm_type)
                assert norms[norm_type].keys() == alone[norm_type].keys()
                assert len(norms[norm_type]) == 1 + 8
                for name, values in norms[norm_type].items():
                    assert values == pytest.approx(alone[norm_type][name], rel=1e-4), (world_size, name)


# --- the end table


@contextlib.contextmanager
def captured_stdout() -> Iterator[io.StringIO]:
    """What is printed while the block runs."""
    with contextlib.redirect_stdout(io.StringIO()) as stream:
        yield stream


def test_end_table_is_printed_once_and_names_bytes_and_the_worst_site() -> None:
    def check(rank: int) -> tuple[str, str, str]:
        with captured_stdout() as printed:
            strategy = fit(TinyModule(vocabulary_parallel=True)).trainer.strategy
        assert isinstance(strategy, TacoTPStrategy)
        console = Console(record=True, width=140, file=io.StringIO())
        console.print(report.end_table(strategy.compression.traffic, strategy.compression.errors))
        with captured_stdout() as printed_off:
            fit(TinyModule(), TacoTPStrategy(compression=None))
        return printed.getvalue(), console.export_text(), printed_off.getvalue()

    (printed, table, printed_off), (printed_elsewhere, table_elsewhere, _) = run_forked(2, check)
    title = "what one rank sent over the tensor-parallel axis"
    assert printed.count("lightning_taco: ") == 1
    assert title in " ".join(printed.split())
    assert printed_elsewhere == printed_off == ""
    assert table == table_elsewhere
    assert title in table
    for column in ("exchange", "messages", "would have been sent", "sent", "ratio"):
        assert column in table
    rows = {cells[0].strip(): [cell.strip() for cell in cells[1:]] for cells in table_rows(table)}
    # 4 batches of 4 x 8 tokens of 32 fp32 values, a message of 1 KiB codes and 32 B scales in place of 4 KiB
    assert rows["all_reduce, forward"] == ["8", "32.0 KiB", "8.2 KiB", "3.88x"]
    assert "all_gather, forward" in rows
    assert "all" in rows
    assert "worst site: model." in table
    assert "dB)" in table


def table_rows(table: str) -> list[list[str]]:
    """The cells of each row of a printed table."""
    return [line.strip("│ ").split("│") for line in table.splitlines() if line.startswith("│")]


class RepeatedPlan(TinyModule):
    """A module whose ``configure_model`` applies its plan whenever it is called."""

    def configure_model(self) -> None:
        self.num_plans = getattr(self, "num_plans", 0) + 1
        self.model = TinyLm() if self.model is None else self.model
        assert self.device_mesh is not None
        apply_tiny_plan(self.model, self.device_mesh, self.plan)


def test_a_plan_that_does_not_look_whether_it_was_applied_is_applied_once() -> None:
    def body(rank: int) -> tuple[int, int]:
        module = RepeatedPlan()
        trainer = fit(module, max_steps=2).trainer
        trainer.validate(module, tiny_dataloader(), verbose=False)
        again = make_trainer(compressing(), max_steps=2)
        again.fit(module, tiny_dataloader())
        return module.num_plans, num_compressed(again.strategy)

    for num_plans, compressed in run_forked(2, body):
        assert num_plans == 1
        assert compressed > 0


class SeenCodecs(Callback):
    """What the session compresses with."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        session = trainer.strategy.session
        codecs = session.config.codecs
        self.elements = {codec.resolved(session.element).element for codec in codecs}


@pytest.mark.parametrize(("element", "text"), [("auto", "element='auto' means INT8 here"), ("e4m3", "has no FP8")])
def test_a_device_without_fp8_is_said_once(element: Any, text: str) -> None:
    def body(rank: int) -> tuple[list[str], set[str]]:
        _compat.supports_fp8 = lambda device: False
        codec, seen = CodecConfig(element=element), SeenCodecs()
        strategy = TacoTPStrategy(CompressionConfig(forward=codec, backward=codec, min_bytes=0))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fit(TinyModule(), strategy, max_steps=1, callbacks=[seen])
        return [str(each.message) for each in caught if "FP8" in str(each.message)], seen.elements

    first, second = run_forked(2, body)
    assert len(first[0]) == 1
    assert text in first[0][0]
    assert second[0] == []  # rank 0 speaks for all
    assert first[1] == second[1] == {"int8" if element == "auto" else "e4m3"}
