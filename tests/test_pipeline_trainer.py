"""`TacoTPStrategy(pipeline_parallel_size=...)` under a Trainer, against the same LightningModule in one process."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor

from lightning_taco.callbacks import GradientNormMonitor
from lightning_taco.pipeline_parallel import LayerOfAnotherStage, PipelineConfig, StageFailedError
from lightning_taco.strategies.pipeline import NOTHING_TRAINED
from tests.lightning_models import captured_messages, full_weights, make_trainer, warm_lightning
from tests.pipeline_lightning import ChainModule, data, one_process_trainer, pipelined
from tests.pipeline_models import Chain
from tests.ranks import run_forked

__all__ = ["warm_lightning"]
pytestmark = pytest.mark.usefixtures("warm_lightning")


def raised(run: Callable[[], Any]) -> str:
    try:
        run()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def life(trainer: L.Trainer, module: ChainModule) -> dict[str, Any]:
    """Fit, then validate, test and predict; what all of it gave."""
    trainer.fit(module, data(), data())
    metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
    validated = trainer.validate(module, data(), verbose=False)[0]["val_loss"]
    tested = trainer.test(module, data(), verbose=False)[0]["test_loss"]
    predicted = torch.cat(trainer.predict(module, data()))
    weights = full_weights(module)
    return {
        "losses": module.losses,
        "metrics": metrics,
        "weights": weights,
        "evaluated": [validated, tested],
        "predicted": predicted,
        "rate": trainer.optimizers and trainer.optimizers[0].param_groups[0]["lr"],
    }


def assert_same_life(found: dict[str, Any], expected: dict[str, Any], tolerance: float = 2e-6) -> None:
    close: dict[str, Any] = {"rtol": tolerance, "atol": tolerance}
    torch.testing.assert_close(found["losses"], expected["losses"], **close)
    torch.testing.assert_close(found["metrics"], expected["metrics"], **close)
    torch.testing.assert_close(found["evaluated"], expected["evaluated"], **close)
    assert torch.equal(found["predicted"], expected["predicted"])
    assert found["weights"]
    for name, weight in found["weights"].items():
        torch.testing.assert_close(weight, expected["weights"][name], **close)


SETTINGS: dict[str, Any] = {"max_epochs": 2, "gradient_clip_val": 0.3}


def test_the_life_of_a_trainer_is_that_of_one_process() -> None:
    accumulating = {**SETTINGS, "accumulate_grad_batches": 2}
    expected = run_forked(
        1,
        lambda _: [
            life(one_process_trainer(**SETTINGS), ChainModule()),
            life(one_process_trainer(**accumulating), ChainModule(frozen=("embedding", "blocks.0"))),
        ],
    )[0]

    def check(rank: int) -> list[dict[str, Any]]:
        first = life(make_trainer(pipelined(), **SETTINGS), ChainModule())
        strategy = pipelined(pipeline_schedule="ZBVZeroBubble")
        return [first, life(make_trainer(strategy, **accumulating), ChainModule(frozen=("embedding", "blocks.0")))]

    results = run_forked(2, check)
    for result in results:
        for found, wanted in zip(result, expected, strict=True):
            assert_same_life(found, wanted)
    names = [set(result[0]["weights"]) for result in results]
    assert not names[0] & names[1]
    assert names[0] | names[1] == set(expected[0]["weights"]), "names of the whole model"


def test_a_stage_with_nothing_to_train() -> None:
    frozen = ("embedding", "blocks.0", "blocks.1")
    expected = run_forked(1, lambda _: life(one_process_trainer(**SETTINGS), ChainModule(frozen=frozen)))[0]

    def check(rank: int) -> tuple[dict[str, Any], int, bool]:
        module = ChainModule(frozen=frozen)
        trainer = make_trainer(pipelined(), **SETTINGS)
        found = life(trainer, module)
        assert all(each.grad is None for each in module.parameters() if not each.requires_grad)
        trained = sum(each.requires_grad for each in module.parameters())
        return found, trained, hasattr(module, NOTHING_TRAINED)

    results = run_forked(2, check)
    assert [trained for _, trained, _ in results] == [0, 7]
    for found, _, has_placeholder in results:
        assert not has_placeholder
        assert_same_life(found, expected)


@pytest.mark.parametrize("is_folder", [True, False])
def test_a_resumed_run_has_the_weights_of_an_unbroken_one(is_folder: bool, tmp_path: Path) -> None:
    """Saved under two stages of one schedule, resumed under another, and (one file) in one process."""
    path = tmp_path / "checkpoint"

    def save(rank: int) -> dict[str, Tensor]:
        trainer = make_trainer(pipelined(save_distributed_checkpoint=is_folder), max_epochs=1)
        module = ChainModule()
        trainer.fit(module, data())
        trainer.save_checkpoint(path)
        unbroken = ChainModule()
        make_trainer(pipelined(), max_epochs=2).fit(unbroken, data())
        return full_weights(unbroken)

    def resume(rank: int, schedule: str) -> dict[str, Tensor]:
        module = ChainModule()
        strategy = pipelined(pipeline_schedule=schedule, save_distributed_checkpoint=is_folder)
        make_trainer(strategy, max_epochs=2).fit(module, data(), ckpt_path=path)
        return full_weights(module)

    expected: dict[str, Tensor] = {}
    for weights in run_forked(2, save):
        expected |= weights
    for schedule in ("1F1B", "ZBVZeroBubble"):
        for weights in run_forked(2, lambda rank: resume(rank, schedule)):  # noqa: B023
            for name, weight in weights.items():
                torch.testing.assert_close(weight, expected[name], rtol=1e-6, atol=1e-6)
    if not is_folder:

        def in_one_process(_: int) -> dict[str, Tensor]:
            module = ChainModule()
            one_process_trainer(max_epochs=2).fit(module, data(), ckpt_path=path)
            return full_weights(module)

        for name, weight in run_forked(1, in_one_process)[0].items():
            torch.testing.assert_close(weight, expected[name], rtol=2e-6, atol=2e-6)


class OwnLayers(ChainModule):
    """Lists the layers itself, around a model that knows nothing of pipelines, and calls itself."""

    def configure_model(self) -> None:
        if self.model is None:
            chain = Chain(self.num_blocks)
            self.model = torch.nn.ModuleDict(dict(chain.named_children()))  # type: ignore[assignment]

    def pipeline_layers(self) -> list[Any]:
        parts: Any = self.model
        return [parts["embedding"], *parts["blocks"], (self.logits, parts["norm"], parts["head"])]

    def logits(self, hidden: Tensor) -> Tensor:
        parts: Any = self.model
        return parts["head"](parts["norm"](hidden))

    def forward(self, tokens: Tensor) -> Tensor:
        parts: Any = self.model
        hidden = parts["embedding"](tokens)
        for block in parts["blocks"]:
            hidden = block(hidden)
        return self.logits(hidden)

    def loss(self, batch: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(self(batch).flatten(0, 1), batch.flatten())

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch).argmax(-1)


def test_a_module_may_list_its_layers_itself() -> None:
    expected = run_forked(1, lambda _: life(one_process_trainer(**SETTINGS), OwnLayers()))[0]
    for found in run_forked(2, lambda _: life(make_trainer(pipelined(), **SETTINGS), OwnLayers())):
        assert_same_life(found, expected)


def test_callbacks_see_the_loss_on_every_rank(tmp_path: Path) -> None:
    def run(trainer_of: Callable[..., L.Trainer]) -> dict[str, Any]:
        best = ModelCheckpoint(tmp_path / "best", monitor="val_loss", save_top_k=1, filename="{epoch}")
        stop = EarlyStopping("val_loss", patience=1, min_delta=10.0)
        norms = GradientNormMonitor(every_n_steps=1, per_parameter=True)
        module = ChainModule()
        trainer = trainer_of(max_epochs=5, callbacks=[best, stop, norms], enable_checkpointing=True)
        trainer.fit(module, data(), data())
        logged = {n: v.item() for n, v in trainer.callback_metrics.items() if "gradient_norm" in n}
        return {"epochs": trainer.current_epoch, "score": best.best_model_score.item(), "norms": logged}

    expected = run_forked(1, lambda _: run(one_process_trainer))[0]

    def check(rank: int) -> dict[str, Any]:
        return run(lambda **settings: make_trainer(pipelined(), **settings))

    for found in run_forked(2, check):
        assert found["epochs"] == expected["epochs"] == 2
        assert found["score"] == pytest.approx(expected["score"], rel=1e-5)
        assert found["norms"].keys() == expected["norms"].keys()
        assert found["norms"] == pytest.approx(expected["norms"], rel=1e-4)


@pytest.mark.parametrize(("precision", "tolerance"), [("bf16-mixed", 2e-3), ("bf16-true", 2e-2)])
def test_precision(precision: str, tolerance: float) -> None:
    settings: dict[str, Any] = {"precision": precision, "max_epochs": 1, "gradient_clip_val": 0.3}

    def run(trainer: L.Trainer) -> tuple[list[float], set[torch.dtype]]:
        module = ChainModule()
        trainer.fit(module, data())
        return module.losses, {each.dtype for each in module.parameters()}

    expected, dtypes = run_forked(1, lambda _: run(one_process_trainer(**settings)))[0]
    for losses, found in run_forked(2, lambda _: run(make_trainer(pipelined(), **settings))):
        assert found == dtypes
        torch.testing.assert_close(losses, expected, rtol=tolerance, atol=0)


class Faulty(ChainModule):
    """Raises in the third batch, on the rank of the last stage."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        logits = self.model(batch)
        if batch_idx == 2:
            raise RuntimeError("the third batch is bad")
        return logits.sum()


class LogsOnce(ChainModule):
    """Logs in one micro-batch only."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        if batch[0, 0] % 2:
            self.log("odd", loss)
        return loss


class Manual(ChainModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class ReturnsNothing(ChainModule):
    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        self.loss(batch)


class Outside(ChainModule):
    """Has a parameter that no stage would own."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = torch.nn.Parameter(torch.ones(()))


class OtherGroups(ChainModule):
    """Leaves out the group that would be empty on the first stage."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        norms = [each for name, each in self.named_parameters() if "norm" in name]
        others = [each for name, each in self.named_parameters() if "norm" not in name]
        return torch.optim.SGD([{"params": group} for group in (others, norms) if group], lr=0.1)


class OwnBackward(ChainModule):
    """Counts its backwards."""

    num_backwards = 0

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        self.num_backwards += 1
        loss.backward()


def test_what_cannot_run_is_refused_on_every_rank_and_leaves_nothing() -> None:
    def check(rank: int) -> dict[str, Any]:
        def fit(module: L.LightningModule, **arguments: Any) -> str:
            return raised(lambda: make_trainer(pipelined(**arguments), max_epochs=1).fit(module, data()))

        faulty = Faulty()
        found = {
            "faulty": fit(faulty),
            "logs": fit(LogsOnce()),
            "manual": fit(Manual()),
            "nothing": fit(ReturnsNothing()),
            "outside": fit(Outside()),
            "tied": fit(ChainModule(tied=True)),
            "groups": fit(OtherGroups()),
            "layers": fit(ChainModule(num_blocks=1), pipeline_schedule="ZBVZeroBubble"),
        }
        own = OwnBackward(), OwnBackward()
        found["runs"] = [fit(own[0]), fit(own[1], pipeline_schedule="ZBVZeroBubble")]
        found["backwards"] = [module.num_backwards for module in own]
        found["same"] = own[0].losses == pytest.approx(own[1].losses, rel=1e-6)
        found["tied on one rank"] = fit(ChainModule(tied=True), pipeline_schedule="ZBVZeroBubble")
        found["left"] = sorted({"log", "configure_model", "optimizer_zero_grad"} & set(faulty.__dict__))
        found["again"] = fit(faulty, pipeline_schedule="ZBVZeroBubble")
        return found

    results = run_forked(2, check)
    for rank, found in enumerate(results):
        assert "RuntimeError: the third batch is bad" in found["faulty"]
        assert found["faulty"].startswith(StageFailedError.__name__) == (rank == 0)
        assert "self.log('odd', ...) was called" in found["logs"]
        assert "use automatic optimization" in found["manual"]
        assert "returned NoneType for a micro-batch" in found["nothing"]
        assert "temperature would be trained on the ranks of the last stage only" in found["outside"]
        assert "configure_optimizers gives [1] / [2] parameter groups" in found["groups"]
        assert "are one parameter (tied weights), but lie in stages of different pipeline ranks" in found["tied"]
        assert "model.embedding.weight and model.head.weight".replace("model.", "") in found["tied"]
        assert "has 3 layers, but 4 pipeline stages" in found["layers"]
        assert found["runs"] == ["nothing was raised"] * 2
        assert found["same"]
        assert found["tied on one rank"] == "nothing was raised"
        assert found["left"] == []
        assert "build a new LightningModule" in found["again"]
    assert [found["backwards"] for found in results] == [[0, 12], [12, 0]], "those of the last stage"


def test_ranks_of_one_pipeline_with_other_batches_are_told() -> None:
    def check(rank: int) -> str:
        module, loader = ChainModule(), data()
        loader.dataset[:] = (loader.dataset + rank) % 20  # type: ignore[index]
        return raised(lambda: make_trainer(pipelined(), max_epochs=1).fit(module, loader))

    for text in run_forked(2, check):
        assert "The ranks of one pipeline group compute one model and must get the same batch" in text


def test_a_short_last_batch_is_right_and_said_once() -> None:
    settings: dict[str, Any] = {"max_epochs": 2}

    def run(trainer: L.Trainer) -> list[float]:
        module = ChainModule()
        trainer.fit(module, data(11), data(11))
        return module.losses

    expected = run_forked(1, lambda _: run(one_process_trainer(**settings)))[0]

    def check(rank: int) -> tuple[list[float], int]:
        with captured_messages() as texts:
            losses = run(make_trainer(pipelined(), **settings))
        return losses, sum("is not a multiple of num_microbatches=4" in text for text in texts)

    results = run_forked(2, check)
    for losses, _ in results:
        torch.testing.assert_close(losses, expected, rtol=1e-6, atol=1e-6)
    assert [count for _, count in results] == [1, 0], "a line of rank 0"


def test_compressed_transfers_are_counted_sampled_and_said() -> None:
    config = PipelineConfig(min_bytes=0)

    def check(rank: int) -> dict[str, Any]:
        module = ChainModule()
        strategy = pipelined(pipeline_compression=config, sample_every_n_steps=2)
        trainer = make_trainer(strategy, max_epochs=1)
        with captured_messages() as texts:
            trainer.fit(module, data(), data())
        counts = strategy.pipeline.counts
        assert counts is not None
        placeholders = [name for name, each in module.named_modules() if isinstance(each, LayerOfAnotherStage)]
        return {
            "texts": texts,
            "sent": {key: count.num_messages for key, count in counts.sent.counts.items()},
            "errors": strategy.pipeline.errors,
            "samples": strategy.pipeline.num_samples,
            "placeholders": placeholders,
        }

    first, last = run_forked(2, check)
    assert {(key.direction, key.outcome): count for key, count in first["sent"].items()} == {
        ("forward", "compressed"): 12,
        ("forward", "evaluation"): 12,
    }, "validation goes as it is"
    assert {(key.direction, key.outcome): count for key, count in last["sent"].items()} == {
        ("backward", "compressed"): 12
    }
    assert list(first["errors"]) == ["forward/stage_0_to_1/model.blocks.1"]
    assert list(last["errors"]) == ["backward/stage_0_to_1/model.blocks.1"]
    assert all(0 < error < 0.02 for each in (first, last) for error in each["errors"].values())
    assert (first["samples"], last["samples"]) == (2, 2)
    assert first["placeholders"] == ["model.blocks.2", "model.blocks.3", "model.norm", "model.head"]
    assert any("they begin at layers 0, 3" in text for text in first["texts"])
    assert any("sent to other stages as" in text for text in first["texts"])
