"""`CompressionMonitor` and `GradientNormMonitor`: which numbers they log, under which step, and that ranks agree.

Trainers and Fabric scripts run in forked gloo ranks; rank 0 writes the table of a CSVLogger, which the test reads. What
the observers behind `CompressionMonitor` measure is the matter of test_exchange_errors.py.
"""

import csv
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from lightning.fabric.loggers import CSVLogger as FabricCSVLogger
from lightning.fabric.loggers import TensorBoardLogger
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import set_checkpoint_early_stop

import lightning_taco.fabric
from lightning_taco import TacoTPStrategy
from lightning_taco.callbacks import CompressionMonitor, GradientNormMonitor, ThroughputReport
from lightning_taco.codec import decode, encode
from lightning_taco.config import CodecConfig, CompressionConfig
from lightning_taco.dtensor import Exchange, Site
from tests.lightning_models import (
    HIDDEN,
    TinyLm,
    TinyModule,
    apply_tiny_plan,
    full,
    full_weights,
    tiny_dataloader,
    tiny_plan,
    warm_lightning,  # noqa: F401  a fixture
)
from tests.ranks import run_forked

pytestmark = pytest.mark.usefixtures("warm_lightning")

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
    devices: int = 2,
    max_steps: int = 8,
    **settings: Any,
) -> L.Trainer:
    """Train `max_steps` steps of 4 batches an epoch; Lightning itself logs at steps 4 and 9 only."""
    trainer = L.Trainer(
        accelerator="cpu",
        devices=devices,
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
    """Keeps what is compressed, by step and site, and what is decoded again, both in float64."""

    def __init__(self) -> None:
        self.messages: dict[tuple[int, str], tuple[Tensor, Tensor]] = {}

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        def observe(exchange: Exchange, site: Site, codec: CodecConfig) -> None:
            values = exchange.tensor.detach().float().flatten()
            decoded = decode(encode(values[None], codec), codec, values.numel(), torch.float32).flatten()
            place = f"{site.direction}/{site.name}/{exchange.kind}"
            self.messages[trainer.global_step, place] = values.double(), decoded.double()

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


def test_monitor_logs_the_figures_of_what_was_sent_at_the_steps_it_was_asked_for(tmp_path: Path) -> None:
    def rank_of(rank: int) -> Any:
        recorder, monitor = Recorder(), CompressionMonitor(every_n_steps=3, num_histograms=0)
        # The strategy's own sampling is replaced, so that nothing is measured twice.
        trainer = fit(tmp_path, [monitor, recorder], strategy=compressing(sample_every_n_steps=1))
        assert trainer.strategy.compression.num_samples == 3  # type: ignore[attr-defined]
        return recorder.messages, {name: value.item() for name, value in trainer.callback_metrics.items()}

    (messages, metrics), (others, other_metrics) = run_forked(2, rank_of)
    assert metrics == other_metrics
    rows = rows_of(tmp_path, RATIO)
    assert list(rows) == [0, 3, 6]
    for step, row in rows.items():
        expected = {}
        for site in (DOWN, UP):
            (own, own_decoded), (other, other_decoded) = messages[step, site], others[step, site]
            assert not torch.equal(own, other)
            sent, decoded = torch.cat([own, other]), torch.cat([own_decoded, other_decoded])
            error = ((decoded - sent).norm() / sent.norm()).item()
            total, result = own + other, own_decoded + other_decoded
            expected |= {
                f"{ERROR}/{site}": error,
                f"compression/decibels/{site}": 20 * math.log10(error),
                f"compression/collective_error/{site}": ((result - total).norm() / total.norm()).item(),
                f"compression/cancellation/{site}": (sent.square().sum() / total.square().sum()).item(),
                f"compression/bytes_saved/{site}": 2 * (4096 - 1056),  # 1024 fp32 values; as many codes, eight scales
            }
        expected[WORST] = max(expected[f"{ERROR}/{site}"] for site in (DOWN, UP))
        expected[RATIO] = 4096 / 1056
        expected["compression/total_bytes_sent"] = (step + 1) * 2 * 2 * 1056
        expected["compression/total_bytes_saved"] = (step + 1) * 2 * 2 * (4096 - 1056)
        assert row == pytest.approx({**expected, "step": step}, rel=1e-5)
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
    sums = {name.removeprefix("compression/cancellation/") for name in row if "/cancellation/" in name}
    assert sums == {site for site in errors if site.endswith("reduce_scatter")}
    for site, error in errors.items():
        # A gather's error is that of one quantisation; ranks add parts that have little to do with each other.
        tolerance = 0.5 if site in sums else 1e-5
        assert row[f"compression/collective_error/{site}"] == pytest.approx(error, rel=tolerance)
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
    # All figures but the totals of what was sent, which a recompute does send.
    figures = [{name: row[name] for name in row if "/total_bytes" not in name} for row in plain.values()]
    assert len(figures[0]) > 2 * (5 + 10)
    assert [{name: row[name] for name in row if "/total_bytes" not in name} for row in recomputed.values()] == figures
    sent = [row["compression/total_bytes_sent"] for row in plain.values()]
    assert [row["compression/total_bytes_sent"] for row in recomputed.values()] == [1.5 * each for each in sent]


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
        for measure in ("collective_error", "cancellation", "decibels"):
            assert row[f"compression/{measure}/{DOWN}"] == row[f"compression/{measure}/{UP}"] == math.inf
    assert healthy[f"compression/collective_error/{UP}"] < 0.05


class Suspender(L.Callback):
    """Sends everything as it is in the first two steps."""

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        assert isinstance(trainer.strategy, TacoTPStrategy)
        assert trainer.strategy.session is not None
        trainer.strategy.session.suspend("test", {None: "not yet"} if trainer.global_step < 2 else {})


def test_monitor_of_a_run_that_compresses_later(tmp_path: Path) -> None:
    def rank_of(rank: int) -> None:
        fit(tmp_path, [Suspender(), CompressionMonitor(every_n_steps=1, num_histograms=1)], max_steps=4)

    run_forked(2, rank_of)
    early, *_, late = rows_of(tmp_path, RATIO).values()
    assert early[RATIO] == 1
    assert early["compression/total_bytes_saved"] == 0
    assert early.keys() == {RATIO, "compression/total_bytes_sent", "compression/total_bytes_saved", "step"}
    assert late[RATIO] > 1.5
    assert late[f"compression/cancellation/{DOWN}"] > 0
    assert len([name for name in late if "/message_" in name]) == 10


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


MAKERS: dict[str, Callable[[], L.Callback]] = {
    "CompressionMonitor": CompressionMonitor,
    "GradientNormMonitor": lambda: GradientNormMonitor(cosine_every_n_steps=1),
    "ThroughputReport": ThroughputReport,
}


@pytest.mark.parametrize("name", MAKERS)
def test_another_strategy_is_refused(name: str) -> None:
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[MAKERS[name]()],
    )
    message = (
        rf"{name} watches what TacoTPStrategy compresses, but the Trainer's strategy is a "
        r"SingleDeviceStrategy; use Trainer\(strategy=TacoTPStrategy\(\.\.\.\)\), or leave the callback out\."
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
        clipped = {step: norm_of(gradients, order) for step, gradients in recorder.after.items()}
        norms = {}
        for step, gradients in recorder.before.items():
            norms[step] = {name: norm_of({name: each}, order) for name, each in gradients.items()}
            norms[step][""] = norm_of(gradients, order)
        metrics = {name: value.item() for name, value in trainer.callback_metrics.items() if "gradient" in name}
        return norms, clipped, metrics

    (norms, clipped, metrics), (_, _, other_metrics) = run_forked(2, rank_of)
    assert metrics == other_metrics
    rows = rows_of(tmp_path, "gradient_norm")
    assert list(rows) == [0, 3, 6]
    for step, row in rows.items():
        expected = {f"gradient_norm/{name}" if name else "gradient_norm": norm for name, norm in norms[step].items()}
        assert row == pytest.approx({**expected, "step": step}, rel=1e-5)
        assert row["gradient_norm"] > 0.01
    assert len(norms[0]) > 5
    after = rows_of(tmp_path, "clipped_gradient_norm")
    assert list(after) == [0, 3, 6]
    for step in (0, 3):  # a next step sets these to zero, and is seen doing so
        assert after[step]["clipped_gradient_norm"] == pytest.approx(clipped[step], rel=1e-5)


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


# Fabric


class FakeTensorBoardLogger(TensorBoardLogger):
    """Stands in for TensorBoard's, which need not be installed; keeps histograms."""

    def __init__(self) -> None:
        self.histograms: dict[tuple[int, str], dict[str, Any]] = {}

    @property
    def experiment(self) -> Any:
        return self

    def add_histogram_raw(self, tag: str, global_step: int, **values: Any) -> None:
        self.histograms[global_step, tag] = values

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        """Scalars are CSVLogger's matter here."""

    def finalize(self, status: str) -> None:
        """Nothing is open."""


def fabric_run(folder: Path | None, num_steps: int = 4) -> Any:
    """Losses, weights and traffic of a script with all monitors, or none; norms by hand; histograms."""
    codec = CodecConfig(element="int4", rounding="stochastic")
    strategy = lightning_taco.fabric.TacoTPStrategy(
        lambda model, mesh: apply_tiny_plan(model, mesh, tiny_plan()),
        CompressionConfig(forward=codec, backward=codec, min_bytes=0),
    )
    tensorboard = FakeTensorBoardLogger()
    loggers: Any = [] if folder is None else [FabricCSVLogger(folder, name="", version=""), tensorboard]
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy, loggers=loggers)
    fabric.launch()
    torch.manual_seed(0)
    lm = TinyLm()
    lm.head.register_forward_hook(lambda module, inputs, output: F.dropout(output, 0.3))
    module: Any = fabric.setup_module(lm)
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(module.parameters(), lr=1e-2, foreach=False))
    norms = GradientNormMonitor(2, per_layer=True, cosine_every_n_steps=2)
    callbacks = [] if folder is None else [CompressionMonitor(2, num_histograms=1), norms, ThroughputReport(2)]
    for callback in callbacks:
        callback.attach(fabric)
    tokens, losses, by_hand = torch.arange(32).view(4, 8), [], {}

    def forward_backward() -> Tensor:
        loss = F.cross_entropy(module(tokens).flatten(0, 1), tokens.flatten())
        fabric.backward(loss)
        return loss

    for step in range(num_steps):
        for callback in callbacks:
            callback.start_step(step)
        loss = forward_backward()
        if callbacks:
            cosine = norms.compare(step, forward_backward, module)
            assert (cosine is None) == (step % 2 == 1)
            norms.before_optimizer(step, optimizer, module)
        by_hand[step] = norm_of({name: full(p.grad) for name, p in module.module.named_parameters()})
        fabric.clip_gradients(module, optimizer, max_norm=0.1)
        optimizer.step()
        for callback in callbacks:
            callback.end_step(step, loss)
        optimizer.zero_grad()
        losses.append(loss.item())
    traffic = strategy.compression.traffic.total()
    strategy.teardown()
    for logger in loggers:
        logger.finalize("success")
    weights = {name: each.tolist() for name, each in full_weights(module.module).items()}
    return (losses, weights, traffic), by_hand, tensorboard.histograms


def test_a_fabric_script_calls_the_same_methods_and_trains_with_the_same_bits(tmp_path: Path) -> None:
    def rank_of(rank: int) -> Any:
        plain, _, _ = fabric_run(None)
        watched, norms, histograms = fabric_run(tmp_path)
        assert watched == plain
        return norms, histograms

    (norms, histograms), (other_norms, _) = run_forked(2, rank_of)
    assert norms == other_norms
    measured = rows_of(tmp_path, RATIO)
    assert list(measured) == [0, 2]
    assert all(f"compression/cancellation/{DOWN.replace('model.', '')}" in row for row in measured.values())
    assert list(rows_of(tmp_path, "throughput/step_ms")) == [1, 3]
    cosines = rows_of(tmp_path, "gradient_cosine")
    assert list(cosines) == [0, 2]
    assert all(0.8 < row["gradient_cosine"] < 0.99999 for row in cosines.values())
    for step, row in rows_of(tmp_path, "gradient_norm").items():
        assert row["gradient_norm"] == pytest.approx(norms[step], rel=1e-5)
        assert row["gradient_norm"] > 0.1
    for row in rows_of(tmp_path, "clipped_gradient_norm").values():
        assert row["clipped_gradient_norm"] == pytest.approx(0.1, rel=1e-4)
    # The site with the largest error in the first sample, in both.
    worst = max((name for name in measured[0] if name.startswith(f"{ERROR}/")), key=lambda name: measured[0][name])
    site = worst.removeprefix(f"{ERROR}/")
    names = [f"compression/message_{when}_rotation/{site}" for when in ("before", "after")]
    assert list(histograms) == [(step, name) for step in (0, 2) for name in names]
    for (step, name), values in histograms.items():
        assert values["num"] == sum(values["bucket_counts"]) == 2 * NUM_VALUES
        assert values["min"] < 0 < values["max"] == values["bucket_limits"][-1]
        assert values["sum_squares"] == pytest.approx(values["num"], rel=0.05)  # in units of the root mean square
        scalar = measured[step][name.replace("message_", "message_100_")]
        assert scalar == pytest.approx(max(values["max"], -values["min"]))


# Arguments


@pytest.mark.parametrize("make", [CompressionMonitor, GradientNormMonitor, ThroughputReport])
@pytest.mark.parametrize("steps", [0, -1, 1.5, True, None, "50"])
def test_every_n_steps_must_be_a_number_of_steps(make: Callable[..., L.Callback], steps: Any) -> None:
    with pytest.raises(ValueError, match=r"every_n_steps=.* is not a number of steps; use an integer from 1 up"):
        make(every_n_steps=steps)


@pytest.mark.parametrize("order", [0, -1.0, -math.inf, math.nan, True, "2"])
def test_norm_type_must_be_the_order_of_a_norm(order: Any) -> None:
    with pytest.raises(ValueError, match=r"norm_type=.* is not the order of a norm; use 1, 2 or inf"):
        GradientNormMonitor(norm_type=order)


@pytest.mark.parametrize("steps", [0, -1, 1.5, True, "50"])
def test_cosine_every_n_steps_must_be_a_number_of_steps(steps: Any) -> None:
    with pytest.raises(ValueError, match=r"cosine_every_n_steps=.* is not a number of steps; use an integer from 1 up"):
        GradientNormMonitor(cosine_every_n_steps=steps)


@pytest.mark.parametrize("number", [-1, 1.0, True, "4"])
@pytest.mark.parametrize("name", ["num_exact_sites", "num_histograms"])
def test_numbers_of_sites_must_be_such(name: str, number: Any) -> None:
    with pytest.raises(ValueError, match=rf"{name}=.* is not a number of sites; use an integer from 0 up"):
        CompressionMonitor(**{name: number})
