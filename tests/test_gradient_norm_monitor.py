"""`GradientNormMonitor`: layers on every mesh, and the cosine, which must not change a bit of the training.

That norms are those of the whole gradient, step by step in a Trainer, is tested in test_callbacks.py.
"""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial

from lightning_taco import TacoTPStrategy
from lightning_taco.callbacks import GradientNormMonitor
from lightning_taco.callbacks.gradient_norm_monitor import layer_of
from lightning_taco.collectives.traffic import TrafficCount
from lightning_taco.config import CodecConfig, CompressionConfig
from tests.lightning_models import (
    TinyLm,
    TinyModule,
    apply_tiny_plan,
    full_weights,
    tiny_plan,
    warm_lightning,  # noqa: F401  a fixture
)
from tests.ranks import run_forked
from tests.test_callbacks import GradientRecorder, fit, norm_of

pytestmark = pytest.mark.usefixtures("warm_lightning")

LAYERS = ("embedding", "norm", "mlp.up", "mlp.down", "head")
LAYOUTS = {"1": (1, 1), "2": (1, 2), "4": (1, 4), "2x2": (2, 2)}


class Collector:
    """A loop, as far as the monitor needs one."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def log_dict(self, values: dict[str, float], step: int) -> None:
        self.rows.append(values)


def norms_by_monitor(model: nn.Module, order: float) -> dict[str, float]:
    """What it logs around an optimizer step whose gradients are halved in between; puts them back."""
    collector, monitor = Collector(), GradientNormMonitor(1, norm_type=order, per_layer=True)
    monitor.attach(collector)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, foreach=False)
    monitor.before_optimizer(0, optimizer, model)
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    locals_ = [each.to_local() if isinstance(each, DTensor) else each for each in gradients]
    torch._foreach_mul_(locals_, 0.5)
    optimizer.step()
    optimizer.step()  # is not logged again
    monitor.end_step(0)
    assert not optimizer._optimizer_step_post_hooks
    torch._foreach_mul_(locals_, 2.0)
    before, after = collector.rows
    return {**before, **after}


def backward(model: TinyLm) -> TinyLm:
    tokens = torch.arange(32).view(4, 8)
    F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).mul(50).backward()
    return model


def make_model() -> TinyLm:
    torch.manual_seed(0)
    return TinyLm()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layer_norms_are_those_of_the_unsharded_model(layout: str) -> None:
    """Sharded, replicated and `Partial` gradients, some of them sharded by FSDP2 as well."""
    sizes = LAYOUTS[layout]

    def rank_main(rank: int) -> Any:
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("data_parallel", "tensor_parallel"))
        model = apply_tiny_plan(make_model(), mesh, tiny_plan(sequence_parallel=True), fsdp=sizes[0] > 1)
        backward(model)
        if layout in ("2", "4"):
            assert model.norm.weight.grad.placements == (Partial(),)  # type: ignore[union-attr]
        return {order: norms_by_monitor(model, order) for order in (1.0, 2.0, math.inf)}

    ranks = run_forked(math.prod(sizes), rank_main)
    assert all(each == ranks[0] for each in ranks)

    def oracle(_: int) -> dict[str, Tensor]:
        return {name: parameter.grad for name, parameter in backward(make_model()).named_parameters()}

    # Forked, since autograd's threads must not exist here before the next fork.
    (gradients,) = run_forked(1, oracle)
    for order, values in ranks[0].items():
        whole = norm_of(gradients, order)
        expected = {"gradient_norm": whole, "clipped_gradient_norm": whole / 2}
        for layer in LAYERS:
            own = {name: each for name, each in gradients.items() if name.rpartition(".")[0] == layer}
            expected[f"layer_gradient_norm/{layer}"] = norm_of(own, order)
        assert values == pytest.approx(expected, rel=1e-5)


def test_names_of_layers() -> None:
    names = {
        "blocks.3.mlp.up.weight": "blocks.3",
        "model.blocks.11.0.bias": "model.blocks.11",
        "model.head.weight": "model.head",
        "scale": "root",
        "0.weight": "0",
    }
    assert {name: layer_of(name) for name in names} == names


# The cosine


class Dropping(TinyModule):
    """With dropout and a buffer that counts forwards, which a second forward could disturb."""

    def configure_model(self) -> None:
        is_new = self.model is None
        super().configure_model()
        if is_new:
            assert self.model is not None
            self.model.register_buffer("num_forwards", torch.zeros(()))
            self.model.head.register_forward_hook(lambda module, inputs, output: self._drop(output))

    def _drop(self, output: Tensor) -> Tensor:
        assert self.model is not None
        self.model.num_forwards += 1  # type: ignore[operator]
        return F.dropout(output, 0.3)


def run(
    cosine: int | None,
    *,
    is_compressed: bool = True,
    module: dict[str, Any] | None = None,
    strategy: dict[str, Any] | None = None,
    **settings: Any,
) -> tuple[Any, dict[str, float], GradientRecorder]:
    """What the training leaves: weights, buffer, random numbers, traffic; the last metrics; gradients by step."""
    codec = CodecConfig(element="int4", rounding="stochastic")
    compression = CompressionConfig(forward=codec, backward=codec, min_bytes=0) if is_compressed else None
    taco = TacoTPStrategy(compression=compression, **(strategy or {}))
    model, recorder = Dropping(**(module or {})), GradientRecorder()
    torch.manual_seed(11)
    monitor = GradientNormMonitor(every_n_steps=100, cosine_every_n_steps=cosine)
    trainer = fit(None, [monitor, recorder], module=model, strategy=taco, **settings)
    metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
    traffic: TrafficCount = taco.compression.traffic.total()
    weights = {name: each.double().tolist() for name, each in full_weights(model).items()}
    num_forwards = model.model.num_forwards.item()  # type: ignore[union-attr]
    return (weights, num_forwards, torch.rand(3).tolist(), traffic, metrics["loss"]), metrics, recorder


def cosine_of(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    left, right = (torch.cat([each.flatten().double() for each in part.values()]) for part in (one, other))
    return (left @ right / (left.norm() * right.norm())).item()


def test_the_cosine_is_that_of_the_exact_gradient_and_measuring_it_changes_no_bit() -> None:
    def rank_of(rank: int) -> Any:
        plain, metrics, _ = run(None, max_steps=4)
        assert "gradient_cosine" not in metrics
        measured, metrics, _ = run(1, max_steps=4)
        assert measured == plain
        assert measured[1] == 4
        _, first, compressed = run(1, max_steps=1)
        exact = run(None, is_compressed=False, max_steps=1)[2]
        expected = cosine_of(compressed.before[0], exact.before[0])
        assert 0.8 < expected < 0.9999  # INT4 turns the gradient a little; other dropout masks would turn it far
        assert first["gradient_cosine"] == pytest.approx(expected, abs=1e-6)
        # The same gradient twice.
        assert run(1, is_compressed=False, max_steps=2)[1]["gradient_cosine"] == pytest.approx(1, abs=1e-9)
        return metrics["gradient_cosine"]

    one, other = run_forked(2, rank_of)
    assert one == other


def test_the_cosine_under_accumulation_is_that_of_a_steps_first_batch() -> None:
    def rank_of(rank: int) -> Any:
        (plain, _, _), (measured, metrics, _) = (
            run(cosine, max_steps=1, accumulate_grad_batches=2) for cosine in (None, 1)
        )
        assert plain == measured
        # The first batch of the first step is the same with and without accumulation, but for a factor.
        assert metrics["gradient_cosine"] == pytest.approx(run(1, max_steps=1)[1]["gradient_cosine"], abs=1e-6)
        return metrics["gradient_cosine"]

    one, other = run_forked(2, rank_of)
    assert one == other
    assert 0.8 < one < 0.9999


def test_the_cosine_with_fsdp_and_partial_gradients_changes_no_bit() -> None:
    settings: dict[str, Any] = {
        "module": {"sequence_parallel": True, "fsdp": True},
        "strategy": {"data_parallel_size": 2, "tensor_parallel_size": 2},
        "devices": 4,
        "max_steps": 2,
    }

    # Processes of their own: DTensor caches the groups of the first mesh of a process.
    plain = run_forked(4, lambda rank: run(None, **settings)[:2])
    measured = run_forked(4, lambda rank: run(1, **settings)[:2])
    assert [state for state, _ in plain] == [state for state, _ in measured]
    values = {metrics["gradient_cosine"] for _, metrics in measured}
    assert len(values) == 1
    assert 0.8 < values.pop() < 0.99999


def test_the_cosine_needs_automatic_optimization() -> None:
    class Manual(TinyModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

    def rank_of(rank: int) -> None:
        message = r"cosine_every_n_steps=5 needs automatic optimization.*Manual\.automatic_optimization is False; leave"
        with pytest.raises(ValueError, match=message):
            fit(None, [GradientNormMonitor(cosine_every_n_steps=5)], module=Manual())

    run_forked(2, rank_of)
