"""`activations=` of both strategies: what is stored, what is said, and that nothing is left. One fork for each."""

import io
import warnings
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric import Fabric
from rich.console import Console
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import lightning_taco.fabric
from examples import gpt
from examples.plans import next_token_loss
from lightning_taco import TacoTPStrategy
from lightning_taco.activations import ActivationConfig, Ledger
from lightning_taco.strategies import report
from lightning_taco.strategies.activations import Activations
from tests.lightning_models import (
    TinyModule,
    captured_messages,
    make_trainer,
    tiny_dataloader,
    warm_lightning,  # noqa: F401  a fixture
)
from tests.ranks import run_forked
from tests.test_activations import SMALL, make_model, tokens

pytestmark = pytest.mark.usefixtures("warm_lightning")
SHORT: dict[str, Any] = {"limit_train_batches": 2, "limit_val_batches": 1}


def hooks_of(module: nn.Module) -> int:
    return sum(len(child._forward_hooks) + len(child._forward_pre_hooks) for child in module.modules())


def fit(strategy: TacoTPStrategy, **settings: Any) -> tuple[TinyModule, L.Trainer]:
    module = TinyModule()
    trainer = make_trainer(strategy, **SHORT, **settings)
    trainer.fit(module, tiny_dataloader(), tiny_dataloader())
    return module, trainer


def check_trainer(rank: int) -> None:
    stock, _ = fit(TacoTPStrategy(compression=None))
    for precision in ("32-true", "bf16-mixed"):
        strategy = TacoTPStrategy(compression=None, activations=SMALL)
        with captured_messages() as messages:
            module, _ = fit(strategy, precision=precision)
        assert hooks_of(module) == hooks_of(stock)
        assert torch.overrides._len_torch_function_stack() == 0
        assert strategy.activations.handles == []
        ledger = strategy.activations.ledger
        assert {kind for _, kind in ledger.rows} >= {"norm", "linear"}
        assert ledger.total.stored_bytes < ledger.total.stock_bytes
        if rank == 0:
            said = "\n".join(messages)
            assert "activations: stored as fp4, block 128, no rotation, 4.25 bits a value, from 0 values up" in said
            assert said.count("lightning_taco: first step:") == 1
            assert "saved tensors" in said
    assert len(module.losses) == len(stock.losses)
    module, _ = fit(TacoTPStrategy(compression=None, activations=SMALL))
    assert module.losses[0] == stock.losses[0]  # the forward is stock torch's
    assert module.losses[1] != stock.losses[1]
    assert abs(module.losses[1] - stock.losses[1]) < 0.02 * abs(stock.losses[1])
    with captured_messages() as messages:  # beside compressed exchanges
        fit(TacoTPStrategy(compression="int8", activations="agoq"), accumulate_grad_batches=2)
    if rank == 0:
        assert any("stored no activation in few bits in the first step: no norm" in text for text in messages)


def test_trainer() -> None:
    run_forked(2, check_trainer)


def parallelize(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return gpt.parallelize(model, mesh["tensor_parallel"], sequence_parallel=True)


def check_fabric(rank: int) -> None:
    losses: dict[str | None, list[float]] = {}
    for name, config in (("stock", None), ("few bits", SMALL)):
        strategy = lightning_taco.fabric.TacoTPStrategy(parallelize, compression=None, activations=config)
        fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
        fabric.launch()
        model = make_model("gpt")
        module = fabric.setup_module(model)
        optimizer = fabric.setup_optimizers(torch.optim.SGD(module.parameters(), lr=0.1, foreach=False))
        losses[name] = []
        for _ in range(2):
            loss = next_token_loss(module(tokens()[:, :-1]), tokens()[:, 1:])
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses[name].append(loss.item())
        ledger = strategy.activations.ledger if config is None else strategy.activations.handles[0].ledger
        before = dict(ledger.rows)
        with torch.no_grad():
            module(tokens()[:, :-1])
        assert ledger.rows == before
        num_hooks = hooks_of(model)
        strategy.teardown()
        if config is None:
            assert before == {}
        else:
            assert before[("blocks.0.attention_norm", "norm")].ratio > 7
            assert hooks_of(model) < num_hooks
            assert strategy.activations.ledger.rows == before  # readable after teardown
    assert losses["few bits"][0] == losses["stock"][0]
    assert losses["few bits"][1] == pytest.approx(losses["stock"][1], rel=0.01)


def test_fabric() -> None:
    run_forked(2, check_fabric)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("fp4", "activations='fp4' is not a recipe; use 'agoq', 'none', or an ActivationConfig"),
        ({"element": "int3"}, "element='int3' is no format of stored activations"),
    ],
)
def test_impossible_settings_are_refused_before_any_work(value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TacoTPStrategy(activations=value)
    with pytest.raises(ValueError, match=message):
        lightning_taco.fabric.TacoTPStrategy(lambda module, mesh: module, activations=value)


def test_off_by_name_and_by_default() -> None:
    for strategy in (TacoTPStrategy(), TacoTPStrategy(activations="none")):
        assert strategy.activations.config is None
    assert TacoTPStrategy(activations="agoq").activations.config == ActivationConfig()
    assert TacoTPStrategy(activations={"element": "nf4"}).activations.config == ActivationConfig(element="nf4")  # type: ignore[arg-type]


def test_a_step_that_stores_nothing_is_said_once() -> None:
    activations = Activations(ActivationConfig())
    model = nn.Linear(8, 8)
    activations.start(model)
    model(torch.randn(2, 8))
    with pytest.warns(UserWarning, match=r"stored no activation in few bits in the first step.*65536 values"):
        activations.report_first_step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        activations.report_first_step()
    activations.stop()


def test_a_compiled_model_is_refused_at_set_up() -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    model[0].compile()
    with pytest.raises(RuntimeError, match="module '0' is compiled"):
        Activations(ActivationConfig()).start(model)


def test_the_table_has_kinds_layers_and_a_sum() -> None:
    ledger = Ledger()
    ledger.add("blocks.0.norm", "norm", 4096, 1024)
    ledger.add("blocks.0.mlp.up", "linear", 4096, 0)
    ledger.add("head", "linear", 2048, 1024)
    console = Console(file=io.StringIO(), width=120)
    report.print_stored_table(ledger, console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    rows = [line.split() for line in text.splitlines()]
    cells = [[cell for cell in row if cell not in "│┃"] for row in rows]
    assert ["norm", "1", "4.0", "KiB", "1.0", "KiB", "4.00x"] in cells
    assert ["linear", "2", "6.0", "KiB", "1.0", "KiB", "6.00x"] in cells
    assert ["blocks.0", "2", "8.0", "KiB", "1.0", "KiB", "8.00x"] in cells
    assert ["all", "3", "10.0", "KiB", "2.0", "KiB", "5.00x"] in cells
