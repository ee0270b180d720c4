"""`CompressionMonitor` and `GradientNormMonitor`: which numbers they log, under which step, and that ranks agree.

Trainers run in forked gloo ranks; rank 0 writes the table of a CSVLogger, which the test reads.
"""

import csv
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import set_checkpoint_early_stop

from lightning_taco import TacoTPStrategy
from lightning_taco.callbacks import CompressionMonitor, GradientNormMonitor
from lightning_taco.codec import decode, encode
from lightning_taco.config import CodecConfig, CompressionConfig
from lightning_taco.dtensor import Exchange, Site
from tests.lightning_models import HIDDEN, TinyModule, tiny_dataloader
from tests.ranks import run_forked

DOWN = "forward/model.mlp.down/all_reduce"
UP = "backward/model.mlp.up/all_reduce"
ERROR, NONFINITE = "compression/relative_error", "compression/nonfinite"
WORST, RATIO = "compression/worst_relative_error", "compression/ratio"
NUM_VALUES = 4 * 8 * HIDDEN  # of one exchange, on one rank

Row = dict[str, float]


def compressing(**settings: Any) -> TacoTPStrategy:
    return TacoTPStrategy(compression=CompressionConfig(min_bytes=0), **settings)


def fit(
    folder: Path | None,
    callbacks: list[L.Callback],
    *,
    module: L.LightningModule | None = None,
    strategy: Any = None,
    max_steps: int = 8,
    **settings: Any,
) -> L.Trainer:
    """Train `max_steps` steps of 4 batches an epoch; Lightning itself logs at steps 4 and 9 only."""
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=compressing() if strategy is None else strategy,
        max_steps=max_steps,
        callbacks=callbacks,
        logger=False if folder is None else CSVLogger(folder, name="", version=""),
        log_every_n_steps=5,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings,
    )
    trainer.fit(TinyModule() if module is None else module, tiny_dataloader())
    return trainer


def rows_of(folder: Path, tag: str) -> dict[int, Row]:
    """The rows of the table that have a value for `tag`, by step, without empty cells."""
    with (folder / "metrics.csv").open() as file:
        rows = [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]
    found = [(int(row["step"]), row) for row in rows if tag in row]
    assert len({step for step, _ in found}) == len(found), "a step is logged twice"
    return dict(found)


class Recorder(L.Callback):
    """Keeps what is compressed, by step and site, and sums squares itself."""

    def __init__(self) -> None:
        self.sums: dict[tuple[int, str], tuple[float, float]] = {}

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        def observe(exchange: Exchange, site: Site, codec: CodecConfig) -> None:
            values = exchange.tensor.detach().float().flatten()
            decoded = decode(encode(values[None], codec), codec, values.numel(), torch.float32).flatten()
            squares = (decoded - values).double().square().sum().item(), values.double().square().sum().item()
            self.sums[trainer.global_step, f"{site.direction}/{site.name}/{exchange.kind}"] = squares

        strategy = trainer.strategy
        assert isinstance(strategy, TacoTPStrategy)
        assert strategy.session is not None
        strategy.session.observers.append(observe)


class GradientRecorder(L.Callback):
    """Keeps the whole gradients of each step, before and after they are clipped."""

    def __init__(self) -> None:
        self.before: dict[int, dict[str, Tensor]] = {}
        self.after: dict[int, dict[str, Tensor]] = {}

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        self.before[trainer.global_step] = self._whole(pl_module)

    def on_before_zero_grad(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        if trainer.global_step:
            self.after[trainer.global_step - 1] = self._whole(pl_module)

    @staticmethod
    def _whole(module: L.LightningModule) -> dict[str, Tensor]:
        found = {name: parameter.grad for name, parameter in module.named_parameters() if parameter.grad is not None}
        whole = {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in found.items()}
        return {name: each.clone() for name, each in whole.items()}


def norm_of(gradients: dict[str, Tensor], order: float = 2.0) -> float:
    return torch.cat([each.flatten() for each in gradients.values()]).double().norm(order).item()


# CompressionMonitor


def test_monitor_logs_the_error_of_what_was_sent_at_the_steps_it_was_asked_for(tmp_path: Path) -> None:
    def rank_of(rank: int) -> Any:
        recorder, monitor = Recorder(), CompressionMonitor(every_n_steps=3)
        # The strategy's own sampling is replaced, so that nothing is measured twice.
        trainer = fit(tmp_path, [monitor, recorder], strategy=compressing(sample_every_n_steps=1))
        assert trainer.strategy.compression.num_samples == 3  # type: ignore[attr-defined]
        return recorder.sums, {name: value.item() for name, value in trainer.callback_metrics.items()}

    (sums, metrics), (other_sums, other_metrics) = run_forked(2, rank_of)
    assert metrics == other_metrics
    assert sums != other_sums
    rows = rows_of(tmp_path, RATIO)
    assert list(rows) == [0, 3, 6]
    for step, row in rows.items():
        expected = {}
        for site in (DOWN, UP):
            squared_error, squared_norm = map(sum, zip(sums[step, site], other_sums[step, site], strict=True))
            expected[f"{ERROR}/{site}"] = math.sqrt(squared_error / squared_norm)
        expected[WORST] = max(expected.values())
        expected[RATIO] = 4096 / 1056  # 1024 fp32 values; as many codes, and eight scales
        assert row == pytest.approx({**expected, "step": step}, rel=1e-6)
    assert all(metrics[name] == pytest.approx(rows[6][name], rel=1e-6) for name in rows[6] if name != "step")


def test_monitor_follows_sequence_parallelism_and_settings_by_module(tmp_path: Path) -> None:
    def rank_of(rank: int) -> None:
        strategy = TacoTPStrategy(
            compression=CompressionConfig(min_bytes=0, exclude=["model.head"], recipes={"model.embedding": "taco"})
        )
        module = TinyModule(sequence_parallel=True)
        fit(tmp_path, [CompressionMonitor(every_n_steps=1)], module=module, strategy=strategy, max_steps=1)

    run_forked(2, rank_of)
    row = rows_of(tmp_path, RATIO)[0]
    errors = {name.removeprefix(f"{ERROR}/"): value for name, value in row.items() if name.startswith(ERROR)}
    assert set(errors) == {
        "forward/model.embedding/reduce_scatter",
        "forward/model.mlp/all_gather",
        "forward/model.mlp.down/reduce_scatter",
        "backward/model.embedding/all_gather",
        "backward/model.mlp/reduce_scatter",
        "backward/model.mlp.down/all_gather",
    }
    for site, error in errors.items():
        assert 0.02 < error < 0.03 if "embedding" in site else 0.004 < error < 0.01, site


def test_recomputed_forward_is_not_measured_twice(tmp_path: Path) -> None:
    def rank_of(rank: int) -> list[tuple[int, ...]]:
        found = []
        for is_checkpointing in (False, True):
            module, folder = TinyModule(checkpointing=is_checkpointing), tmp_path / str(is_checkpointing)
            with set_checkpoint_early_stop(False):  # the exchange is the last thing that is recomputed
                trainer = fit(folder, [CompressionMonitor(every_n_steps=1)], module=module, max_steps=2)
            compression = trainer.strategy.compression  # type: ignore[attr-defined]
            num_messages = compression.traffic.total(direction="forward").num_messages
            found.append((num_messages, *(error.num_values for error in compression.errors.values())))
        return found

    values = (2 * NUM_VALUES, 2 * NUM_VALUES)  # forward and backward, of two ranks
    assert run_forked(2, rank_of) == [[(2, *values), (4, *values)]] * 2
    plain, recomputed = (rows_of(tmp_path / str(is_checkpointing), WORST) for is_checkpointing in (False, True))
    errors = [{name: row[name] for name in (WORST, f"{ERROR}/{DOWN}", f"{ERROR}/{UP}")} for row in plain.values()]
    assert [{name: row[name] for name in errors[0]} for row in recomputed.values()] == errors


class Diverging(TinyModule):
    """From the second step on, rank 1 computes one NaN in the middle of the MLP."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def configure_model(self) -> None:
        def spoil(module: Any, inputs: Any, output: Tensor) -> Tensor:
            spoilt = torch.zeros_like(output)
            spoilt[0, 0, 0] = math.nan
            return output + spoilt if self.rank == 1 and self.trainer.global_step == 1 else output

        is_new = self.model is None
        super().configure_model()
        if is_new:
            self.model.mlp.up.register_forward_hook(spoil)  # type: ignore[union-attr]


def test_non_finite_values_are_counted_and_make_the_error_infinite(tmp_path: Path) -> None:
    def rank_of(rank: int) -> Any:
        trainer = fit(tmp_path, [CompressionMonitor(every_n_steps=1)], module=Diverging(rank), max_steps=3)
        return {name: value.item() for name, value in trainer.callback_metrics.items() if "compression/" in name}

    metrics, others = run_forked(2, rank_of)
    assert metrics == others
    healthy, spoilt, lost = rows_of(tmp_path, RATIO).values()
    assert not any(name.startswith(NONFINITE) for name in healthy)
    assert healthy[WORST] < 0.03
    # One row of the residual stream on rank 1, which makes its block NaN on both ranks; so are their gradients.
    assert spoilt[f"{NONFINITE}/{DOWN}"] == HIDDEN
    assert spoilt[f"{NONFINITE}/{UP}"] == 2 * CodecConfig().block_size
    # Every weight is NaN after the step.
    assert lost[f"{NONFINITE}/{DOWN}"] == lost[f"{NONFINITE}/{UP}"] == 2 * NUM_VALUES
    for row in (spoilt, lost):
        assert row[WORST] == row[f"{ERROR}/{DOWN}"] == row[f"{ERROR}/{UP}"] == math.inf


def test_monitor_without_a_logger_and_on_a_second_fit() -> None:
    def rank_of(rank: int) -> None:
        monitor, module = CompressionMonitor(every_n_steps=2), TinyModule()
        for _ in range(2):
            trainer = fit(None, [monitor], module=module, max_steps=3)
            assert trainer.strategy.compression.num_samples == 2  # type: ignore[attr-defined]
            assert 0.004 < trainer.callback_metrics[WORST].item() < 0.01

    run_forked(2, rank_of)


def test_monitor_of_an_uncompressed_run_logs_nothing(tmp_path: Path) -> None:
    """So that a compressed configuration and its twin may differ in the strategy only."""

    def rank_of(rank: int) -> list[str]:
        strategy = TacoTPStrategy(compression=None)
        trainer = fit(tmp_path, [CompressionMonitor(every_n_steps=1)], strategy=strategy)
        trainer.validate(TinyModule(), tiny_dataloader(), verbose=False)
        return [name for name in trainer.callback_metrics if "compression" in name]

    assert run_forked(2, rank_of) == [[], []]
    assert rows_of(tmp_path, "loss")
    assert rows_of(tmp_path, RATIO) == {}


def test_monitor_of_another_strategy_is_refused() -> None:
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[CompressionMonitor()],
    )
    message = (
        r"CompressionMonitor watches what TacoTPStrategy compresses, but the Trainer's strategy is a "
        r"SingleDeviceStrategy; use Trainer\(strategy=TacoTPStrategy\(\)\), or leave the callback out\."
    )
    with pytest.raises(TypeError, match=message):
        trainer.fit(TinyModule(parallelize=False), tiny_dataloader())


# GradientNormMonitor


@pytest.mark.parametrize("order", [2.0, 1, math.inf])
def test_gradient_norm_is_that_of_the_whole_gradient_before_clipping(tmp_path: Path, order: float) -> None:
    def rank_of(rank: int) -> Any:
        recorder = GradientRecorder()
        monitor = GradientNormMonitor(every_n_steps=3, norm_type=order, per_parameter=True)
        module = TinyModule(sequence_parallel=order == 2.0)  # norm weights have partial gradients
        trainer = fit(tmp_path, [monitor, recorder], module=module, gradient_clip_val=0.01)
        assert norm_of(recorder.after[3]) == pytest.approx(0.01, rel=1e-4)
        norms = {}
        for step, gradients in recorder.before.items():
            norms[step] = {name: norm_of({name: each}, order) for name, each in gradients.items()}
            norms[step][""] = norm_of(gradients, order)
        return norms, {name: value.item() for name, value in trainer.callback_metrics.items() if "gradient" in name}

    (norms, metrics), (_, other_metrics) = run_forked(2, rank_of)
    assert metrics == other_metrics
    rows = rows_of(tmp_path, "gradient_norm")
    assert list(rows) == [0, 3, 6]
    for step, row in rows.items():
        expected = {f"gradient_norm/{name}" if name else "gradient_norm": norm for name, norm in norms[step].items()}
        assert row == pytest.approx({**expected, "step": step}, rel=1e-5)
        assert row["gradient_norm"] > 0.01
    assert len(norms[0]) > 5


def test_gradient_norm_under_accumulation_is_logged_once_an_optimizer_step(tmp_path: Path) -> None:
    def rank_of(rank: int) -> Any:
        recorder = GradientRecorder()
        fit(tmp_path, [GradientNormMonitor(every_n_steps=1), recorder], max_steps=3, accumulate_grad_batches=2)
        return [norm_of(gradients) for gradients in recorder.before.values()]

    norms = run_forked(2, rank_of)[0]
    rows = rows_of(tmp_path, "gradient_norm")
    assert [row["gradient_norm"] for row in rows.values()] == pytest.approx(norms, rel=1e-5)
    assert list(rows) == [0, 1, 2]


def test_gradient_norm_needs_no_tensor_parallelism(tmp_path: Path) -> None:
    recorder = GradientRecorder()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=2,
        logger=CSVLogger(tmp_path, name="", version=""),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[GradientNormMonitor(every_n_steps=1), recorder],
    )
    trainer.fit(TinyModule(parallelize=False), tiny_dataloader())
    rows = rows_of(tmp_path, "gradient_norm")
    expected = [norm_of(gradients) for gradients in recorder.before.values()]
    assert [row["gradient_norm"] for row in rows.values()] == pytest.approx(expected, rel=1e-5)


# Arguments


@pytest.mark.parametrize("make", [CompressionMonitor, GradientNormMonitor])
@pytest.mark.parametrize("steps", [0, -1, 1.5, True, None, "50"])
def test_every_n_steps_must_be_a_number_of_steps(make: Callable[..., L.Callback], steps: Any) -> None:
    with pytest.raises(ValueError, match=r"every_n_steps=.* is not a number of steps; use an integer from 1 up"):
        make(every_n_steps=steps)


@pytest.mark.parametrize("order", [0, -1.0, -math.inf, math.nan, True, "2"])
def test_norm_type_must_be_the_order_of_a_norm(order: Any) -> None:
    with pytest.raises(ValueError, match=r"norm_type=.* is not the order of a norm; use 1, 2 or inf"):
        GradientNormMonitor(norm_type=order)
