"""``TacoTPStrategy(data_parallel=...)`` under Trainer and Fabric: plain data parallelism, FSDP2, and both beside TP.

Four forked gloo ranks, one fork for all. Each rank takes its own sample of each batch, so that the mean over ranks is
the whole batch's, which one process computes beside them.
"""

import io
import re
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import ModelCheckpoint
from rich.console import Console
from torch import Tensor
from torch.distributed.fsdp import fully_shard

import lightning_taco.fabric
from lightning_taco import CodecConfig, CompressionConfig, TacoTPStrategy
from lightning_taco.data_parallel import DataParallelConfig, DataParallelTraffic
from lightning_taco.data_parallel.quantized_gradient import quantized_gradient
from lightning_taco.data_parallel.replicated import make_buckets
from lightning_taco.data_parallel.settings import RECIPES, resolve_data_parallel, weight_differences
from lightning_taco.data_parallel.traffic import COMPRESSED, INSIDE_NODE, WEIGHTS
from lightning_taco.strategies import report
from lightning_taco.strategies.gradients import gradient_norm
from tests.lightning_models import TinyModule, full_weights, make_trainer, tiny_dataloader, warm_lightning  # noqa: F401
from tests.models import local
from tests.ranks import run_forked

pytestmark = pytest.mark.usefixtures("warm_lightning")

SGD: Callable[[Any], torch.optim.Optimizer] = partial(torch.optim.SGD, lr=0.2, foreach=False)
GRADIENTS = DataParallelConfig(min_bytes=0)
BOTH = DataParallelConfig(min_bytes=0, weights=weight_differences())
FP8 = CodecConfig(element="e4m3", rotation=False, rounding="stochastic")
QUANGRAD = DataParallelConfig(min_bytes=0, gradients_inside_node=FP8, gradients_between_nodes=FP8, accumulation=FP8)
INT8_KEPT = DataParallelConfig(min_bytes=0, accumulation=CodecConfig(element="int8"))
LENGTHS: dict[str, Any] = {"limit_val_batches": 0}


class Shared(TinyModule):
    """Each data-parallel rank takes its own samples of each batch."""

    def __init__(self, *, num_shares: int = 4, differs: bool = False, **options: Any) -> None:
        super().__init__(parallelize=options.pop("parallelize", False), **options)
        self.num_shares, self.differs = num_shares, differs
        self.norms: list[float] = []
        self.has_plain_gradients = False

    def configure_model(self) -> None:
        if self.model is None:
            super().configure_model()
            if self.differs:
                with torch.no_grad():
                    for parameter in self.parameters():
                        parameter.add_(dist.get_rank())
            if self.fsdp and not self.parallelize:
                assert self.device_mesh is not None
                fully_shard(self.model, mesh=self.device_mesh["data_parallel"])

    def loss(self, batch: Tensor) -> Tensor:
        place = 0 if self._device_mesh is None else self._device_mesh["data_parallel"].get_local_rank()
        return super().loss(batch[place :: self.num_shares])

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.norms.append(gradient_norm(list(self.parameters())).item())
        self.has_plain_gradients |= any(parameter.grad is not None for parameter in self.parameters())


def fit(module: Any, data_parallel: Any, *, tensor: int = 1, **settings: Any) -> tuple[Any, TacoTPStrategy, Any]:
    compression = CompressionConfig(min_bytes=0) if tensor > 1 else None
    strategy = TacoTPStrategy(
        compression=compression,
        data_parallel=data_parallel,
        tensor_parallel_size=tensor,
        data_parallel_size=4 // tensor,
    )
    checkpoint = settings.pop("ckpt_path", None)
    trainer = make_trainer(strategy, **(LENGTHS | settings))
    trainer.fit(module, tiny_dataloader(), ckpt_path=checkpoint)
    return full_weights(module), strategy, trainer


def reference(accumulate: int = 1, make: Any = SGD, clip: float | None = None) -> tuple[dict[str, Tensor], list[float]]:
    """Weights and gradient norms of one process on whole batches."""
    module = TinyModule(parallelize=False)
    module.configure_model()
    optimizer, norms = make(module.parameters()), []
    for index, batch in enumerate(tiny_dataloader()):
        (TinyModule.loss(module, batch) / accumulate).backward()
        if (index + 1) % accumulate == 0:
            norms.append(gradient_norm(list(module.parameters())).item())
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(module.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    return full_weights(module), norms


def moved(weights: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    """How far `weights` are from `exact`, as a part of how far training has moved those."""
    start = TinyModule(parallelize=False)
    start.configure_model()
    begin = full_weights(start)

    def flat(values: dict[str, Tensor]) -> Tensor:
        return torch.cat([values[name].flatten() for name in begin])

    return ((flat(weights) - flat(exact)).norm() / (flat(exact) - flat(begin)).norm()).item()


def same_on_all_ranks(weights: dict[str, Tensor]) -> bool:
    flat = torch.cat([each.flatten() for each in weights.values()])
    everybodys = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(everybodys, flat)
    return all(torch.equal(flat, each) for each in everybodys)


def check_plain() -> dict[str, Any]:
    """Plain data parallelism: tensor_parallel_size=1 and a model that nobody has wrapped."""
    found: dict[str, Any] = {}
    for accumulate in (1, 2):
        module = Shared(make_optimizer=SGD)
        weights, strategy, _ = fit(module, GRADIENTS, accumulate_grad_batches=accumulate)
        exact, norms = reference(accumulate)
        found[f"{accumulate}"] = (moved(weights, exact), same_on_all_ranks(weights))
        found[f"norms {accumulate}"] = [a / b - 1 for a, b in zip(module.norms, norms, strict=True)]
        found[f"exchanges {accumulate}"] = strategy.data_parallel.traffic.total(outcome=COMPRESSED).num_messages
    weights, _, _ = fit(Shared(make_optimizer=SGD, differs=True), GRADIENTS, limit_train_batches=1)
    found["first rank's weights"] = same_on_all_ranks(weights)
    hooks = [parameter._post_accumulate_grad_hooks for parameter in module.parameters()]
    found["hooks left"] = sum(len(each) for each in hooks if each)
    weights, _, _ = fit(Shared(make_optimizer=SGD), DataParallelConfig(min_bytes=1 << 30))
    found["as it is"] = moved(weights, reference()[0])
    return found


def check_fsdp() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for accumulate in (1, 2):
        module = Shared(make_optimizer=SGD, fsdp=True)
        weights, strategy, _ = fit(module, GRADIENTS, accumulate_grad_batches=accumulate)
        found[f"{accumulate}"] = moved(weights, reference(accumulate)[0])
        found[f"exchanges {accumulate}"] = strategy.data_parallel.traffic.total(kind="reduce_scatter").num_messages
    weights, strategy, _ = fit(Shared(make_optimizer=SGD, fsdp=True), BOTH)
    traffic = strategy.data_parallel.traffic
    found["sdp4bit"] = moved(weights, reference()[0])
    found["what"] = sorted({key.site for key in traffic.counts if key.outcome == COMPRESSED})
    return found


def check_resume(folder: Path) -> bool:
    """Resumed after the first of two epochs: the bits of the unbroken run, in which that checkpoint was written."""

    def run(**settings: Any) -> dict[str, Tensor]:
        saving = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)
        options = {"enable_checkpointing": True, "callbacks": [saving], "max_epochs": 2} | settings
        return fit(Shared(fsdp=True), BOTH, **options)[0]

    unbroken = run()
    resumed = run(ckpt_path=folder / "epoch=0.ckpt")
    return all(torch.equal(unbroken[name], resumed[name]) for name in unbroken)


def check_tensor_parallel() -> dict[str, Any]:
    module = Shared(make_optimizer=SGD, num_shares=2, parallelize=True, fsdp=True)
    weights, strategy, _ = fit(module, BOTH, tensor=2)
    unwrapped = Shared(make_optimizer=SGD, num_shares=2, parallelize=True)
    plain, plain_strategy, _ = fit(unwrapped, GRADIENTS, tensor=2)
    exact = reference()[0]
    return {
        "fsdp": moved(weights, exact),
        "plain": moved(plain, exact),
        "same": same_on_all_ranks(plain),
        "tensor-parallel exchanges": strategy.compression.traffic.total(outcome=COMPRESSED).num_messages,
        "data-parallel exchanges": strategy.data_parallel.traffic.total(outcome=COMPRESSED).num_messages,
        "plain data-parallel exchanges": plain_strategy.data_parallel.traffic.total(outcome=COMPRESSED).num_messages,
    }


def check_quangrad() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for fsdp in (False, True):
        for name, config in (("fp8", QUANGRAD), ("int8", INT8_KEPT)):
            module = Shared(make_optimizer=SGD, fsdp=fsdp)
            weights, _, _ = fit(module, config, accumulate_grad_batches=2, gradient_clip_val=0.1)
            exact, norms = reference(2, clip=0.1)
            case = f"{name}, fsdp={fsdp}"
            found[case] = moved(weights, exact)
            found[f"norms {case}"] = max(abs(a / b - 1) for a, b in zip(module.norms, norms, strict=True))
            found[f"plain gradients {case}"] = module.has_plain_gradients
            found[f"left {case}"] = any(quantized_gradient(parameter) is not None for parameter in module.parameters())
            found[f"same {case}"] = same_on_all_ranks(weights)
    fused = partial(torch.optim.AdamW, lr=1e-2, fused=True)
    weights, _, trainer = fit(Shared(make_optimizer=fused), INT8_KEPT, accumulate_grad_batches=2)
    found["fused AdamW"] = moved(weights, reference(2, make=fused)[0])
    found["step left"] = "step" in trainer.optimizers[0].__dict__
    by_value = partial(fit, Shared(make_optimizer=SGD), INT8_KEPT)
    weights, _, _ = by_value(gradient_clip_val=1e-3, gradient_clip_algorithm="value")
    found["clipped by value"] = moved(weights, clipped_by_value(1e-3))
    return found


def clipped_by_value(limit: float) -> dict[str, Tensor]:
    module = TinyModule(parallelize=False)
    module.configure_model()
    optimizer = SGD(module.parameters())
    for batch in tiny_dataloader():
        TinyModule.loss(module, batch).backward()
        torch.nn.utils.clip_grad_value_(module.parameters(), limit)
        optimizer.step()
        optimizer.zero_grad()
    return full_weights(module)


def check_unused() -> dict[str, bool]:
    """A parameter that only rank 0 uses gets the mean; one that nobody uses gets nothing and is not decayed."""

    class Unused(Shared):
        def configure_model(self) -> None:
            super().configure_model()
            self.sometimes = torch.nn.Parameter(torch.ones(3))
            self.never = torch.nn.Parameter(torch.ones(3))

        def loss(self, batch: Tensor) -> Tensor:
            loss = super().loss(batch)
            return loss + 4 * self.sometimes.sum() if dist.get_rank() == 0 else loss

    found = {}
    for name, config in (("plain", GRADIENTS), ("quantised", INT8_KEPT)):
        module = Unused(make_optimizer=partial(torch.optim.SGD, lr=0.5, weight_decay=0.1))
        fit(module, config, limit_train_batches=1)
        # sometimes: 1 - 0.5 * (1 + 0.1)
        found[f"sometimes {name}"] = bool((module.sometimes - 0.45).abs().max() < 0.01)
        found[f"never {name}"] = bool((module.never == 1).all())
    return found


def check_fabric() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, config, fsdp in (("plain", GRADIENTS, False), ("fsdp", BOTH, True), ("quangrad", INT8_KEPT, False)):

        def parallelize(model: Any, mesh: Any, fsdp: bool = fsdp) -> Any:
            return fully_shard(model, mesh=mesh["data_parallel"]) if fsdp else model

        strategy = lightning_taco.fabric.TacoTPStrategy(
            parallelize, compression=None, data_parallel=config, tensor_parallel_size=1, data_parallel_size=4
        )
        fabric = Fabric(accelerator="cpu", devices=4, strategy=strategy)
        fabric.launch()
        whole = TinyModule(parallelize=False)
        whole.configure_model()
        module = fabric.setup_module(whole.model)
        optimizer = fabric.setup_optimizers(SGD(module.parameters()))
        for index, batch in enumerate(tiny_dataloader()):
            with fabric.no_backward_sync(module, enabled=index % 2 == 0):
                share = batch[dist.get_rank() :: 4]
                loss = torch.nn.functional.cross_entropy(module(share).flatten(0, 1), share.flatten())
                fabric.backward(loss / 2)
            if index % 2:
                optimizer.step()
                optimizer.zero_grad()
        weights = {f"model.{name}": value for name, value in full_weights(whole.model).items()}
        found[name] = moved(weights, reference(2)[0])
        kind = "reduce_scatter"
        found[f"exchanges {name}"] = strategy.data_parallel.traffic.total(kind=kind, outcome=COMPRESSED).num_messages
        strategy.teardown()
        found[f"left {name}"] = strategy.data_parallel.is_on or "step" in optimizer.optimizer.__dict__
    return found


def four_ranks(rank: int, folder: Path) -> dict[str, Any]:
    return {
        "plain": check_plain(),
        "fsdp": check_fsdp(),
        "resume": check_resume(folder),
        "tensor parallel": check_tensor_parallel(),
        "quangrad": check_quangrad(),
        "unused": check_unused(),
        "fabric": check_fabric(),
    }


@cache
def outcome(folder: Path) -> Any:
    try:
        return run_forked(4, partial(four_ranks, folder=folder))
    except AssertionError as error:  # kept, so that a failure costs one fork only
        return error


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, warm_lightning: None) -> list[dict[str, Any]]:  # noqa: F811
    result = outcome(tmp_path_factory.mktemp("checkpoints"))
    if isinstance(result, AssertionError):
        raise result
    return result


def test_plain_data_parallelism_needs_no_wrapper(found: list[dict[str, Any]]) -> None:
    for rank in found:
        for accumulate in ("1", "2"):
            error, same = rank["plain"][accumulate]
            assert error < 0.02
            assert same
            assert max(map(abs, rank["plain"][f"norms {accumulate}"])) < 0.01
        assert rank["plain"]["first rank's weights"]
        assert rank["plain"]["as it is"] < 1e-4
        assert rank["plain"]["hooks left"] == 0


def test_accumulated_batches_are_exchanged_once(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["plain"]["exchanges 1"] == 2 * rank["plain"]["exchanges 2"] > 0
        assert rank["fsdp"]["exchanges 1"] == 2 * rank["fsdp"]["exchanges 2"] > 0


def test_fsdp_through_the_trainer(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["fsdp"]["1"] < 0.02
        assert rank["fsdp"]["2"] < 0.02
        assert rank["fsdp"]["sdp4bit"] < 0.1
        assert rank["fsdp"]["what"] == [INSIDE_NODE, WEIGHTS]


def test_a_resumed_run_has_the_bits_of_the_unbroken_one(found: list[dict[str, Any]]) -> None:
    assert all(rank["resume"] for rank in found)


def test_beside_tensor_parallelism(found: list[dict[str, Any]]) -> None:
    for rank in found:
        result = rank["tensor parallel"]
        assert result["fsdp"] < 0.1
        assert result["plain"] < 0.04
        assert result["same"]
        assert result["tensor-parallel exchanges"] > 0
        assert result["data-parallel exchanges"] > 0
        assert result["plain data-parallel exchanges"] > 0


@pytest.mark.parametrize("case", ["fp8, fsdp=False", "fp8, fsdp=True", "int8, fsdp=False", "int8, fsdp=True"])
def test_quantised_gradients_train_as_exact_ones(found: list[dict[str, Any]], case: str) -> None:
    """Accumulated over two batches and clipped; norms are the exact ones within the codec's error."""
    for rank in found:
        result = rank["quangrad"]
        assert result[case] < (0.12 if "fp8" in case else 0.03)
        assert result[f"norms {case}"] < 0.02
        assert not result[f"plain gradients {case}"]
        assert not result[f"left {case}"]
        assert result[f"same {case}"]


def test_quantised_gradients_with_other_optimizers_and_clipping(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["quangrad"]["fused AdamW"] < 0.2  # Adam turns small gradients into full steps, of either sign
        assert not rank["quangrad"]["step left"]
        assert rank["quangrad"]["clipped by value"] < 0.05


def test_parameters_that_some_ranks_do_not_use(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert all(rank["unused"].values()), rank["unused"]


def test_fabric(found: list[dict[str, Any]]) -> None:
    for rank in found:
        result = rank["fabric"]
        assert result["plain"] < 0.02
        assert result["fsdp"] < 0.1
        assert result["quangrad"] < 0.03
        assert result["exchanges plain"] == 4  # two steps, each an all-to-all and an all-gather
        assert result["exchanges fsdp"] == 2
        assert not any(result[f"left {name}"] for name in ("plain", "fsdp", "quangrad"))


# Without ranks


def test_recipes_and_fields() -> None:
    sdp4bit = resolve_data_parallel("sdp4bit")
    assert sdp4bit is not None
    assert sdp4bit.gradients_inside_node == CodecConfig(element="int8", rounding="stochastic")
    assert sdp4bit.gradients_between_nodes == CodecConfig(element="int4", rounding="stochastic")
    assert sdp4bit.weights == weight_differences()
    assert RECIPES["tlq_hs"] == DataParallelConfig()
    assert resolve_data_parallel("none") is None
    assert resolve_data_parallel(None) is None
    fields = {"gradients_inside_node": {"element": "int8"}, "gradients_between_nodes": None, "min_bytes": 0}
    assert resolve_data_parallel(fields) == DataParallelConfig(
        gradients_inside_node=CodecConfig(), gradients_between_nodes=None, min_bytes=0
    )


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        ("fp3", ValueError, "data_parallel='fp3' is not a recipe; use one of 'sdp4bit', 'tlq_hs', 'quangrad', 'none'"),
        ({"bits": 4}, ValueError, "data_parallel has no field 'bits'; it has 'gradients_inside_node'"),
        (3, TypeError, "has type int; use a recipe name"),
        ({"min_bytes": -1}, ValueError, "min_bytes=-1 is not a number of bytes"),
        ({"node_size": 0}, ValueError, "node_size=0 is not a number of ranks"),
        ({"num_slices": 0}, ValueError, "num_slices=0 is not a number of pieces"),
        ({"seed": -1}, ValueError, "seed=-1 is out of range"),
        ({"weights": 4}, ValueError, "weights=4 is neither a CodecConfig nor None"),
        ({"weights": {"element": "auto"}}, ValueError, "weights.element='auto' is for intermediate tensors"),
        ({"weights": {"scale_mode": "dual"}}, ValueError, "weights has scale_mode='dual'"),
        (
            {"gradients_inside_node": {"block_size": 64}},
            ValueError,
            "give both the same block_size and the same rotation",
        ),
    ],
)
def test_impossible_settings_are_refused(value: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=re.escape(text)):
        TacoTPStrategy(data_parallel=value)


def test_buckets_hold_one_dtype_and_not_too_much() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(n)) for n in (3 << 20, 3 << 20, 1, 7 << 20, 2)]
    parameters.append(torch.nn.Parameter(torch.zeros(5, dtype=torch.bfloat16)))
    buckets = make_buckets(parameters)
    assert [[each.numel() for each in bucket] for bucket in buckets] == [[5], [2], [7 << 20], [1, 3 << 20, 3 << 20]]


def test_end_table_shows_bytes_and_bits() -> None:
    traffic = DataParallelTraffic()
    traffic.record_inside_node(torch.empty(2, 264, dtype=torch.uint8), 2, 256, 4)
    traffic.record_stock(INSIDE_NODE, "reduce_scatter", 100, "smaller than min_bytes=5")
    console = Console(file=io.StringIO(), width=120)
    report.print_data_parallel_table(traffic, console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert re.search(r"gradients inside a node .* 1 .* 1\.0 KiB .* 264 B .* 3\.88x .* 8\.25", text)
    assert "not compressed, 1 messages: smaller than min_bytes=5" in text


def test_off_is_off() -> None:
    strategy = TacoTPStrategy()
    assert strategy.data_parallel.config is None
    assert not strategy.data_parallel.is_on
    assert strategy.data_parallel.state_dict() is None
    with strategy.data_parallel.no_sync():
        strategy.data_parallel.finish_backward()
    strategy.data_parallel.stop()
    assert isinstance(strategy, L.pytorch.strategies.ModelParallelStrategy)
    assert local(torch.ones(1)) == 1
