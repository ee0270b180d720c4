"""Checkpoints of `TacoTPStrategy` under a Trainer: a resumed run is the unbroken run, at any tensor-parallel size.

Ranks are forked processes (`run_forked`). A run is two epochs of two batches; it is broken after the first.
"""

import functools
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging, ModelCheckpoint
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial
from torch.utils.data import DataLoader

from lightning_taco import CompressionConfig, TacoTPStrategy
from tests.lightning_models import (
    TinyModule,
    full,
    full_weights,
    make_trainer,
    tiny_dataloader,
    warm_lightning,  # noqa: F401  a fixture
)
from tests.ranks import run_forked

pytestmark = pytest.mark.usefixtures("warm_lightning")
EVERYTHING = CompressionConfig(min_bytes=0)
FORMATS = (True, False)  # a folder with a file per rank, or one file
NUM_BATCHES = 2
SHORT: dict[str, Any] = {"limit_val_batches": 0}


def epoch() -> DataLoader[Tensor]:
    """The batches of an epoch, and of its validation."""
    return tiny_dataloader(num_samples=4 * NUM_BATCHES)


class State(NamedTuple):
    """Everything that a resumed run must have in common with the unbroken one."""

    weights: dict[str, Tensor]
    first_moments: dict[str, Tensor]
    second_moments: dict[str, Tensor]
    steps: dict[str, Tensor]


def state_of(module: L.LightningModule) -> State:
    """Weights and AdamW's moments, whole, by parameter name."""
    for child in module.modules():
        if isinstance(child, FSDPModule):
            child.reshard()  # a validation leaves the root module's parameters gathered
    optimizer = module.trainer.optimizers[0]
    states = {name: optimizer.state[parameter] for name, parameter in module.named_parameters()}
    moments = [
        {name: full(state[key]).clone() for name, state in states.items()} for key in ("exp_avg", "exp_avg_sq", "step")
    ]
    return State(full_weights(module), *moments)


class StateAtStart(Callback):
    """Keeps the state that the first training step starts from."""

    state: State

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.state = state_of(pl_module)


def fit(
    module: TinyModule,
    folder: Path | None = None,
    *,
    is_distributed: bool = True,
    num_epochs: int = 2,
    resume_from: Path | None = None,
    callbacks: tuple[Callback, ...] = (),
    data_parallel_size: int = 1,
    **trainer_settings: Any,
) -> State:
    """Fit `module`; write a checkpoint for each epoch into `folder`, ``epoch=0.ckpt`` first."""
    strategy = TacoTPStrategy(
        EVERYTHING,
        data_parallel_size=data_parallel_size,
        tensor_parallel_size=dist.get_world_size() // data_parallel_size,
        save_distributed_checkpoint=is_distributed,
    )
    saver = [] if folder is None else [ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1, monitor="loss")]
    trainer = make_trainer(
        strategy,
        max_epochs=num_epochs,
        callbacks=[*saver, *callbacks],
        enable_checkpointing=folder is not None,
        **trainer_settings,
    )
    data = epoch()
    trainer.fit(module, data, data, ckpt_path=None if resume_from is None else str(resume_from))
    return state_of(module)


def differences(first: State, second: State) -> list[str]:
    """What is not equal to the last bit."""
    return [
        f"{field}.{name}"
        for field, ours, theirs in zip(State._fields, first, second, strict=True)
        for name in ours.keys() | theirs.keys()
        if name not in ours or name not in theirs or not torch.equal(ours[name], theirs[name])
    ]


def first_checkpoint(folder: Path) -> Path:
    """What `fit` wrote after the first epoch."""
    return folder / "epoch=0.ckpt"


# What the module is made of, and the formats in which it is saved. Sequence parallelism in one file is loaded below;
# what compiling adds to names is taken off like what wrapping adds, which only one file depends on.
CASES: dict[str, tuple[dict[str, Any], tuple[bool, ...]]] = {
    "partly parallel": ({}, FORMATS),
    "sequence parallel": ({"sequence_parallel": True}, (True,)),
    "tied": ({"tied": True}, FORMATS),
    "compiled": ({"compile_backend": "eager"}, (False,)),
    "wrapped": ({"checkpoint_wrapper": True}, FORMATS),
}


@pytest.mark.usefixtures("compiler_is_loaded")
@pytest.mark.parametrize(("options", "formats"), CASES.values(), ids=CASES)
def test_resumed_run_is_the_unbroken_run_bit_for_bit(
    options: dict[str, Any], formats: tuple[bool, ...], tmp_path: Path
) -> None:
    def check(rank: int) -> None:
        unbroken = TinyModule(**options)
        expected = fit(unbroken)
        for is_distributed in formats:
            folder = tmp_path / str(is_distributed)
            fit(TinyModule(**options), folder, is_distributed=is_distributed, num_epochs=1)
            path = first_checkpoint(folder)
            assert path.is_dir() == is_distributed
            resumed = TinyModule(**options)
            state = fit(resumed, is_distributed=is_distributed, resume_from=path)
            assert differences(state, expected) == []
            assert resumed.losses == unbroken.losses[NUM_BATCHES:]
            assert resumed.validation_losses == unbroken.validation_losses[NUM_BATCHES:]
            assert resumed.model is not None
            assert (resumed.model.head.weight is resumed.model.embedding.weight) == ("tied" in options)
            # and evaluation takes the same file
            evaluated = TinyModule(**options)
            trainer = make_trainer(TacoTPStrategy(EVERYTHING, save_distributed_checkpoint=is_distributed))
            trainer.validate(evaluated, epoch(), str(path), verbose=False)
            assert evaluated.validation_losses == unbroken.validation_losses[:NUM_BATCHES]

    run_forked(2, check)


def test_checkpoint_of_two_ranks_loads_at_any_tensor_parallel_size(tmp_path: Path) -> None:
    options: dict[str, Any] = {"sequence_parallel": True}

    def save(rank: int) -> State:
        for is_distributed in FORMATS:
            folder = tmp_path / str(is_distributed)
            state = fit(TinyModule(**options), folder, is_distributed=is_distributed, num_epochs=1, **SHORT)
        return state

    def load(rank: int) -> list[tuple[State, list[float]]]:
        results = []
        for is_distributed in FORMATS:
            start, module = StateAtStart(), TinyModule(**options)
            path = first_checkpoint(tmp_path / str(is_distributed))
            fit(module, resume_from=path, callbacks=(start,), is_distributed=is_distributed, **SHORT)
            results.append((start.state, module.losses))
        return results

    saved, *_ = run_forked(2, save)
    assert any(moment.abs().max() > 0 for moment in saved.first_moments.values())
    all_losses = []
    for world_size in (1, 4):  # on two it is resumed above, and to the last bit
        for results in run_forked(world_size, load):
            for state, losses in results:
                assert differences(state, saved) == [], world_size
                all_losses.append(losses)
    assert all(losses == pytest.approx(all_losses[0], rel=0.01) for losses in all_losses)


def test_checkpoint_of_tensor_parallel_with_fsdp_resumes_and_loads_without_fsdp(tmp_path: Path) -> None:
    def check(rank: int) -> State:
        settings = {"data_parallel_size": 2, **SHORT}
        expected = fit(TinyModule(fsdp=True), **settings)
        for is_distributed in FORMATS:
            folder = tmp_path / str(is_distributed)
            fit(TinyModule(fsdp=True), folder, is_distributed=is_distributed, num_epochs=1, **settings)
            start = StateAtStart()
            resumed = fit(
                TinyModule(fsdp=True),
                is_distributed=is_distributed,
                resume_from=first_checkpoint(folder),
                callbacks=(start,),
                **settings,
            )
            assert differences(resumed, expected) == []
        return start.state

    def load(rank: int) -> list[State]:
        starts = []
        for is_distributed in FORMATS:
            starts.append(StateAtStart())
            path = first_checkpoint(tmp_path / str(is_distributed))
            fit(TinyModule(), resume_from=path, callbacks=(starts[-1],), is_distributed=is_distributed, **SHORT)
        return [start.state for start in starts]

    saved, *_ = run_forked(4, check)
    for states in run_forked(2, load):
        for state in states:
            assert differences(state, saved) == []


def test_one_file_is_plain_and_holds_whole_tensors(tmp_path: Path) -> None:
    def check(rank: int) -> dict[str, Tensor]:
        module = TinyModule(tied=True)
        fit(module, tmp_path, is_distributed=False, num_epochs=1, **SHORT)
        return full_weights(module)

    weights, _ = run_forked(2, check)
    checkpoint = torch.load(first_checkpoint(tmp_path), weights_only=True)
    saved = checkpoint["state_dict"]
    assert {type(value) for value in saved.values()} == {Tensor}
    assert torch.equal(saved["model.embedding.weight"], saved["model.head.weight"])
    whole = TinyModule(tied=True, parallelize=False)
    whole.configure_model()
    assert whole.load_state_dict(saved).missing_keys == []
    assert all(torch.equal(saved[name], weight) for name, weight in weights.items())
    assert len(checkpoint["optimizer_states"][0]["state"]) == len(weights)


class DTensorMetricModule(TinyModule):
    """Logs a DTensor under the name that `fit`'s checkpoints are ranked by."""

    def training_step(self, batch: Tensor, batch_index: int) -> Tensor:
        loss = self.loss(batch)
        assert self.device_mesh is not None
        part = DTensor.from_local(loss.detach() / 2, self.device_mesh["tensor_parallel"], [Partial()])
        self.log("loss", part)
        return loss


def test_checkpoint_ranked_by_a_dtensor_metric_resumes(tmp_path: Path) -> None:
    def check(rank: int) -> None:
        fit(DTensorMetricModule(), tmp_path, num_epochs=1, **SHORT)
        fit(DTensorMetricModule(), tmp_path, resume_from=first_checkpoint(tmp_path), **SHORT)

    run_forked(2, check)
    for epoch in range(2):
        metadata = torch.load(tmp_path / f"epoch={epoch}.ckpt" / "meta.pt", weights_only=True)
        (saver,) = metadata["callbacks"].values()
        assert type(saver["best_model_score"]) is Tensor
        assert type(saver["current_score"]) is Tensor


# --- tied weights and averaged weights


class TieWatcher(Callback):
    """Fails when embedding and head are not one parameter, or the optimizer has it twice."""

    def __init__(self) -> None:
        self.num_checks = 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.check(trainer, pl_module)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        self.check(trainer, pl_module)

    def check(self, trainer: L.Trainer, module: Any) -> None:
        weight = module.model.embedding.weight
        assert module.model.head.weight is weight
        assert isinstance(weight, DTensor)
        assert (
            sum(parameter is weight for group in trainer.optimizers[0].param_groups for parameter in group["params"])
            == 1
        )
        self.num_checks += 1


def test_tied_weights_stay_tied_and_get_the_gradient_of_both_places() -> None:
    def losses_of(parallelize: bool, rank: int) -> list[float]:
        module, watcher = TinyModule(tied=True, parallelize=parallelize), TieWatcher()
        if not parallelize:
            make_trainer("auto", max_epochs=2).fit(module, tiny_dataloader())
            return module.losses
        strategy = TacoTPStrategy(None)
        make_trainer(strategy, max_epochs=2, callbacks=[watcher]).fit(module, tiny_dataloader())
        assert watcher.num_checks == 1 + 8
        second = make_trainer(compression_strategy(), callbacks=[watcher])
        second.fit(module, tiny_dataloader())
        assert watcher.num_checks == 2 * 1 + 8 + 4
        return module.losses[:8]

    (expected,) = run_forked(1, functools.partial(losses_of, False))
    for losses in run_forked(2, functools.partial(losses_of, True)):
        assert losses == pytest.approx(expected, rel=1e-4)


def compression_strategy() -> TacoTPStrategy:
    """A strategy that compresses whatever it may."""
    return TacoTPStrategy(EVERYTHING)


class AverageByHand(Callback):
    """The exponential average of the weights, whole, as `EMAWeightAveraging` is to have it."""

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self.average: dict[str, Tensor] = {}

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        for name, weight in full_weights(pl_module).items():
            old = self.average.get(name)
            self.average[name] = weight if old is None else self.decay * old + (1 - self.decay) * weight


@pytest.mark.parametrize(("tied", "formats"), [(False, FORMATS), (True, (True,))], ids=["", "tied"])
def test_exponential_averaging_of_weights_and_its_resume(tied: bool, formats: tuple[bool, ...], tmp_path: Path) -> None:
    def check(rank: int) -> None:
        for is_distributed in formats:
            folder, by_hand, module = tmp_path / str(is_distributed), AverageByHand(0.5), TinyModule(tied=tied)
            callbacks = (by_hand, *([TieWatcher()] if tied else []), EMAWeightAveraging(decay=0.5))
            fit(module, folder, is_distributed=is_distributed, callbacks=callbacks)
            averaged = full_weights(module)
            assert averaged.keys() == by_hand.average.keys()
            assert max((averaged[name] - by_hand.average[name]).abs().max().item() for name in averaged) < 1e-6
            assert module.losses[-1] < module.losses[0]

            path, resumed, averaging = first_checkpoint(folder), TinyModule(tied=tied), EMAWeightAveraging(decay=0.5)
            fit(resumed, is_distributed=is_distributed, resume_from=path, callbacks=(averaging,))
            assert resumed.losses == module.losses[NUM_BATCHES:]
            assert resumed.validation_losses == module.validation_losses[NUM_BATCHES:]
            final = full_weights(resumed)
            assert [name for name in final if not torch.equal(final[name], averaged[name])] == []

            # without the callback the average is what is loaded, as Lightning has it
            evaluated = TinyModule(tied=tied)
            trainer = make_trainer(TacoTPStrategy(EVERYTHING, save_distributed_checkpoint=is_distributed))
            trainer.validate(evaluated, epoch(), str(path), verbose=False)
            assert evaluated.validation_losses == module.validation_losses[:NUM_BATCHES]

    run_forked(2, check)
