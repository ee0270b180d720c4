"""`lightning_taco.fabric.TacoTPStrategy`: a training loop in forked gloo ranks, what it compresses and what it leaves.

`LOCAL_RANK` is set in a forked rank, so Fabric launches nothing. What a compressed exchange computes is the matter of
test_collectives.py and test_seam.py; here it is when one happens, and that everything else is Lightning's.
"""

import io
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor.placement_types as placement_types
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy
from lightning.fabric.wrappers import _FabricModule
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import lightning_taco.fabric
from lightning_taco.config import CompressionConfig
from lightning_taco.dtensor import is_installed
from lightning_taco.dtensor.scopes import sessions_in_scope
from lightning_taco.fabric import TacoTPStrategy
from tests.models import EVERYTHING, TinyLm, local, loss_of, make_plan, make_tokens
from tests.ranks import run_forked

STEP = {
    ("embedding", "forward", "all_reduce"): 1,
    ("blocks.0.mlp.down", "forward", "all_reduce"): 1,
    ("blocks.1.mlp.down", "forward", "all_reduce"): 1,
    ("head", "forward", "all_gather"): 1,
    ("head", "backward", "all_reduce"): 1,
    ("blocks.1.mlp.up", "backward", "all_reduce"): 1,
    ("blocks.0.mlp.up", "backward", "all_reduce"): 1,
}
"""Messages of one training step of a `TinyLm`."""


def parallelize(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return parallelize_module(model, mesh["tensor_parallel"], make_plan(2, sequence_parallel=False))


def parallelize_partly(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Only the first MLP: embedding, norms, the other MLP and the head stay plain tensors."""
    plan = {"blocks.0.mlp.up": ColwiseParallel(), "blocks.0.mlp.down": RowwiseParallel()}
    return parallelize_module(model, mesh["tensor_parallel"], plan)


def parallelize_and_shard(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    parallelize(model, mesh)
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh["data_parallel"])
    return fully_shard(model, mesh=mesh["data_parallel"])


def make_lm(checkpointing: str | None = None) -> TinyLm:
    torch.manual_seed(0)
    model = TinyLm()
    for block in model.blocks:
        block.checkpointing = checkpointing
    torch.manual_seed(1)  # of the dropout masks
    return model


@contextmanager
def launched(strategy: ModelParallelStrategy, devices: int = 2, precision: Any = "32-true") -> Iterator[Fabric]:
    fabric = Fabric(accelerator="cpu", devices=devices, strategy=strategy, precision=precision)
    fabric.launch()
    yield fabric
    if isinstance(strategy, TacoTPStrategy):
        strategy.teardown()


def set_up(fabric: Fabric, model: nn.Module) -> tuple[Any, Any]:
    module = fabric.setup_module(model)
    return module, fabric.setup_optimizers(torch.optim.AdamW(module.parameters(), lr=1e-2, foreach=False))


def train(fabric: Fabric, module: Any, optimizer: Any, num_steps: int = 2) -> list[float]:
    losses = []
    for _ in range(num_steps):
        loss = loss_of(module, make_tokens())
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def named_parameters(module: Any) -> Iterator[tuple[str, Tensor]]:
    """Of the model itself, also where Fabric has wrapped it."""
    return (module.module if isinstance(module, _FabricModule) else module).named_parameters()


def weights(module: Any) -> dict[str, Tensor]:
    return {name: local(parameter).detach().clone() for name, parameter in named_parameters(module)}


def gradients(module: Any) -> dict[str, Tensor]:
    return {name: local(parameter.grad).clone() for name, parameter in named_parameters(module)}


def full_gradients(module: Any) -> dict[str, Tensor]:
    found = {name: parameter.grad for name, parameter in named_parameters(module)}
    return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in found.items()}


def same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def messages(strategy: TacoTPStrategy) -> dict[tuple[str, str, str], int]:
    """Messages by site, direction and kind since the last call; all of them must have been compressed."""
    counts = strategy.compression.traffic.counts
    assert {key.outcome for key in counts} <= {"compressed"}, counts
    found = {(key.site, key.direction, key.kind): count.num_messages for key, count in counts.items()}
    strategy.compression.traffic.clear()
    return found


def of_rank(rank: int) -> Tensor:
    return torch.randn(16, 256, generator=torch.Generator().manual_seed(rank))


def is_loop_exact(strategy: TacoTPStrategy) -> bool:
    """Whether DTensor sums exactly over the tensor-parallel ranks when the training loop itself asks it to."""
    mesh = strategy.device_mesh["tensor_parallel"]
    partial = DTensor.from_local(of_rank(dist.get_rank()), mesh, [Partial()], run_check=False)
    return torch.equal(partial.redistribute(placements=[Replicate()]).to_local(), of_rank(0) + of_rank(1))


def num_hooks(module: nn.Module) -> int:
    return sum(len(child._forward_pre_hooks) + len(child._forward_hooks) for child in module.modules())


# What is compressed, and when


def test_training_loop_compresses_forward_and_backward_only() -> None:
    def rank_of(rank: int) -> tuple[Any, ...]:
        strategy = TacoTPStrategy(parallelize, compression=EVERYTHING)
        with launched(strategy) as fabric:
            module, optimizer = set_up(fabric, make_lm())
            assert is_installed()
            assert strategy.session is strategy.compression.session is not None
            loss = loss_of(module, make_tokens())
            after_forward = messages(strategy)
            is_exact, was_in_scope = is_loop_exact(strategy), bool(sessions_in_scope())
            between = messages(strategy)
            fabric.backward(loss)
            after_backward = messages(strategy)
            is_exact = is_exact and is_loop_exact(strategy)
            fabric.clip_gradients(module, optimizer, max_norm=1.0)
            optimizer.step()
            {name: parameter.full_tensor() for name, parameter in named_parameters(module) if "mlp" in name}
            afterwards = messages(strategy)
            return after_forward, between, after_backward, afterwards, was_in_scope, is_exact

    for forward, between, backward, afterwards, was_in_scope, is_exact in run_forked(2, rank_of):
        assert forward == {key: number for key, number in STEP.items() if key[1] == "forward"}
        assert backward == {key: number for key, number in STEP.items() if key[1] == "backward"}
        assert between == afterwards == {}
        assert not was_in_scope
        assert is_exact


def test_losses_and_weights_are_the_same_on_all_ranks_and_close_to_exact_ones() -> None:
    def rank_of(rank: int) -> tuple[Any, ...]:
        results: dict[str, Any] = {}
        for name, compression in (("exact", None), ("compressed", EVERYTHING)):
            strategy = TacoTPStrategy(parallelize, compression=compression)
            with launched(strategy) as fabric:
                module, optimizer = set_up(fabric, make_lm())
                losses = train(fabric, module, optimizer, num_steps=4)
                norm = module.blocks[0].norm.weight.detach().clone()  # not in the plan: whole on every rank
                results[name] = losses, norm
        return results["exact"], results["compressed"]

    (exact, compressed), (exact_1, compressed_1) = run_forked(2, rank_of)
    assert exact[0] == exact_1[0]
    assert compressed[0] == compressed_1[0]
    assert torch.equal(compressed[1], compressed_1[1])
    assert compressed[0] != exact[0]
    torch.testing.assert_close(torch.tensor(compressed[0]), torch.tensor(exact[0]), rtol=0.02, atol=0.01)


def test_evaluation_is_exact_unless_it_is_asked_for() -> None:
    def rank_of(rank: int) -> dict[str, Any]:
        logits: dict[str, Tensor] = {}
        found: dict[str, Any] = {}
        for name, compression in {
            "off": None,
            "training": EVERYTHING,
            "always": CompressionConfig(min_bytes=0, during_validation=True),
        }.items():
            strategy = TacoTPStrategy(parallelize, compression=compression)
            with launched(strategy) as fabric:
                module = fabric.setup_module(make_lm())
                module.eval()
                with torch.no_grad():
                    logits[name] = module(make_tokens())
                found[name] = messages(strategy)
                module.train()
                fabric.backward(loss_of(module, make_tokens()))
                found[f"{name}, then training"] = messages(strategy)
        found["is exact"] = torch.equal(logits["off"], logits["training"])
        found["is compressed"] = not torch.equal(logits["off"], logits["always"])
        return found

    found = run_forked(2, rank_of)[1]
    assert found["is exact"]
    assert found["is compressed"]
    assert found["training"] == {}
    assert found["always"] == {key: number for key, number in STEP.items() if key[1] == "forward"}
    assert found["training, then training"] == found["always, then training"] == STEP
    assert found["off, then training"] == {}


def test_marked_forward_method_is_compressed() -> None:
    class Module(TinyLm):
        def training_loss(self, tokens: Tensor) -> Tensor:
            return loss_of(self, tokens)

    def rank_of(rank: int) -> Any:
        strategy = TacoTPStrategy(parallelize, compression=EVERYTHING)
        with launched(strategy) as fabric:
            module = fabric.setup_module(Module())
            module.mark_forward_method("training_loss")
            fabric.backward(module.training_loss(make_tokens()))
            return messages(strategy), bool(sessions_in_scope())

    assert run_forked(2, rank_of)[0] == (STEP, False)


def test_gradient_accumulation_compresses_each_micro_batch() -> None:
    def rank_of(rank: int) -> Any:
        strategy = TacoTPStrategy(parallelize, compression=EVERYTHING)
        with launched(strategy) as fabric:
            module = fabric.setup_module(make_lm())
            for is_accumulating in (True, False):
                with fabric.no_backward_sync(module, enabled=is_accumulating):
                    fabric.backward(loss_of(module, make_tokens()))
            return messages(strategy)

    assert run_forked(2, rank_of)[0] == {key: 2 for key in STEP}


def test_error_is_sampled_every_n_steps() -> None:
    def rank_of(rank: int) -> Any:
        strategy = TacoTPStrategy(parallelize, compression=EVERYTHING, sample_every_n_steps=2)
        with launched(strategy) as fabric:
            module, optimizer = set_up(fabric, make_lm())
            counts = []
            for _ in range(5):
                train(fabric, module, optimizer, num_steps=1)
                counts.append(strategy.compression.num_samples)
            return counts, strategy.compression.errors

    (counts, errors), (_, others) = run_forked(2, rank_of)
    assert counts == [1, 1, 2, 2, 3]
    assert {tuple(key) for key in errors} == set(STEP)
    assert errors == others
    assert all(0.004 < error.relative_l2_error < 0.01 for error in errors.values())


def test_nothing_compressed_in_the_first_step_is_said_with_the_reason() -> None:
    def rank_of(rank: int) -> list[str]:
        strategy = TacoTPStrategy(parallelize, compression="default")
        with launched(strategy) as fabric, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            module, optimizer = set_up(fabric, make_lm())
            train(fabric, module, optimizer, num_steps=2)
            return [str(each.message) for each in caught if "lightning_taco" in str(each.message)]

    texts, others = run_forked(2, rank_of)
    assert texts == ["lightning_taco compressed nothing in the first step: 7 x smaller than min_bytes=1048576."]
    assert others == []  # said once, by rank 0


# Off is off


def test_compression_none_is_bit_equal_to_lightning() -> None:
    def rank_of(rank: int) -> Any:
        results = []
        for strategy in (ModelParallelStrategy(parallelize), TacoTPStrategy(parallelize, compression=None)):
            with launched(strategy) as fabric:
                model = make_lm()
                module, optimizer = set_up(fabric, model)
                assert not is_installed()
                losses = train(fabric, module, optimizer, num_steps=3)
                results.append((losses, weights(module), num_hooks(model)))
        (losses, stock, hooks), (our_losses, ours, our_hooks) = results
        return losses == our_losses, same_bits(stock, ours), hooks == our_hooks, losses

    for same_losses, same_weights, same_hooks, losses in run_forked(2, rank_of):
        assert same_losses
        assert same_weights
        assert same_hooks
        assert losses[2] < losses[0]


# Clipping


def test_clipping_a_partly_parallel_model_equals_one_process() -> None:
    """Lightning's own strategy raises here, on the mixture of DTensors and plain tensors."""
    nothing = CompressionConfig(min_bytes=1 << 30)

    def one_process(limits: dict[str, float]) -> dict[str, Tensor]:
        model = make_lm()
        loss_of(model, make_tokens()).backward()
        if "max_norm" in limits:
            nn.utils.clip_grad_norm_(model.parameters(), limits["max_norm"])
        else:
            nn.utils.clip_grad_value_(model.parameters(), limits["clip_val"])
        return full_gradients(model)

    def rank_of(rank: int) -> list[float]:
        largest = []
        for compression, limits in product((None, nothing), ({"max_norm": 0.05}, {"clip_val": 1e-4})):
            with launched(TacoTPStrategy(parallelize_partly, compression=compression)) as fabric:
                module, optimizer = set_up(fabric, make_lm())
                fabric.backward(loss_of(module, make_tokens()))
                fabric.clip_gradients(module, optimizer, **limits)  # type: ignore[arg-type]
                found, expected = full_gradients(module), one_process(limits)
                assert found.keys() == expected.keys()
                for name in expected:
                    torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-8, msg=name)
                values = torch.cat([value.flatten() for value in found.values()])
                largest.append((values.norm() if "max_norm" in limits else values.abs().max()).item())
        return largest

    assert run_forked(2, rank_of) == [pytest.approx([0.05, 1e-4, 0.05, 1e-4], rel=1e-4)] * 2


def test_clipping_returns_the_norm_and_refuses_a_non_finite_one_on_every_rank() -> None:
    def rank_of(rank: int) -> tuple[float, float, str]:
        strategy = TacoTPStrategy(parallelize_partly, compression=EVERYTHING)
        with launched(strategy) as fabric:
            module, optimizer = set_up(fabric, make_lm())
            fabric.backward(loss_of(module, make_tokens()))
            norm = fabric.clip_gradients(module, optimizer, max_norm=1e9)
            own = math.sqrt(sum(value.square().sum().item() for value in full_gradients(module).values()))
            if rank == 1:
                local(module.blocks[0].mlp.up.weight.grad)[0, 0] = math.nan
            with pytest.raises(RuntimeError) as raised:
                fabric.clip_gradients(module, optimizer, max_norm=1.0)
            assert norm is not None
            return norm.item(), own, str(raised.value)

    for norm, own, text in run_forked(2, rank_of):
        assert norm == pytest.approx(own, rel=1e-5)
        assert "The gradient norm of order 2.0 is nan" in text


# Checkpoints


def test_resumed_run_equals_the_unbroken_one_bit_for_bit(tmp_path: Path) -> None:
    def run(path: Path, is_distributed: bool, is_resumed: bool) -> Any:
        strategy = TacoTPStrategy(parallelize, compression=EVERYTHING, save_distributed_checkpoint=is_distributed)
        with launched(strategy) as fabric:
            module, optimizer = set_up(fabric, make_lm())
            state = {"model": module, "optimizer": optimizer, "step": 0 if is_resumed else 2}
            if is_resumed:
                fabric.load(path, state)
            else:
                train(fabric, module, optimizer, num_steps=2)
                strategy.compression.traffic.clear()
                fabric.save(path, state)
                assert messages(strategy) == {}  # a checkpoint is exact, and no traffic
            torch.manual_seed(2)
            losses = train(fabric, module, optimizer, num_steps=2)
            moments = {
                f"{index} {name}": local(value).clone()
                for index, each in enumerate(optimizer.state.values())
                for name, value in each.items()
            }
            return losses, weights(module), moments, state["step"]

    def rank_of(rank: int) -> None:
        for is_distributed in (True, False):
            path = tmp_path / ("folder" if is_distributed else "file")
            losses, unbroken, moments, _ = run(path, is_distributed, is_resumed=False)
            resumed_losses, resumed, resumed_moments, step = run(path, is_distributed, is_resumed=True)
            assert step == 2
            assert resumed_losses == losses
            assert same_bits(resumed, unbroken)
            assert same_bits(resumed_moments, moments)
            assert len(moments) == 3 * len(unbroken)

    run_forked(2, rank_of)
    assert (tmp_path / "folder").is_dir()
    assert (tmp_path / "file").is_file()


# Several modules, exceptions, teardown


def test_two_modules_on_one_strategy() -> None:
    def rank_of(rank: int) -> None:
        with launched(ModelParallelStrategy(parallelize)) as fabric:
            stock_hooks = num_hooks(fabric.setup_module(make_lm()).module)
        strategy = TacoTPStrategy(parallelize, compression=EVERYTHING)
        with launched(strategy) as fabric:
            generator = fabric.setup_module(make_lm())
            session = strategy.session
            critic = fabric.setup_module(make_lm())
            assert strategy.session is session is not None
            fabric.backward(loss_of(generator, make_tokens()))
            assert messages(strategy) == STEP
            critic.eval()
            fabric.backward(loss_of(generator, make_tokens()) + loss_of(critic, make_tokens()))
            # The critic's forward is exact in evaluation; its backward belongs to the same fabric.backward.
            assert messages(strategy) == {key: 2 if key[1] == "backward" else 1 for key in STEP}
            assert num_hooks(generator.module) == num_hooks(critic.module) > stock_hooks
            strategy.teardown()
            assert num_hooks(generator.module) == num_hooks(critic.module) == stock_hooks
            assert not is_installed()

    run_forked(2, rank_of)


class Fails(RuntimeError):
    pass


class _FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise Fails("in backward")


class Fragile(TinyLm):
    """Raises in the middle of forward, or of backward, when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.error: BaseException | None = None
        self.fails_in_backward = False

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.blocks[0](self.embedding(tokens))
        if self.error is not None:
            raise self.error
        hidden = _FailsInBackward.apply(hidden) if self.fails_in_backward else hidden
        return self.head(self.blocks[1](hidden))


def test_exception_leaves_the_scope_closed_and_training_can_go_on() -> None:
    def rank_of(rank: int) -> None:
        strategy = TacoTPStrategy(parallelize, compression=EVERYTHING)
        with launched(strategy) as fabric:
            torch.manual_seed(0)
            model = Fragile()
            module, optimizer = set_up(fabric, model)
            model.error = Fails("in forward")
            with pytest.raises(Fails, match="in forward"):
                module(make_tokens())
            assert not sessions_in_scope()
            assert is_loop_exact(strategy)

            model.error, model.fails_in_backward = None, True
            with pytest.raises(Fails, match="in backward"):
                fabric.backward(loss_of(module, make_tokens()))
            assert not sessions_in_scope()
            assert is_loop_exact(strategy)

            model.fails_in_backward = False
            optimizer.zero_grad()
            strategy.compression.traffic.clear()
            train(fabric, module, optimizer, num_steps=1)
            assert messages(strategy) == STEP
            assert not sessions_in_scope()

            model.error = KeyboardInterrupt()  # torch runs no forward hook for it
            with pytest.raises(KeyboardInterrupt):
                module(make_tokens())
        assert not sessions_in_scope()
        assert not is_installed()

    run_forked(2, rank_of)


def test_teardown_leaves_nothing_and_the_next_run_starts_afresh() -> None:
    def patched() -> list[Any]:
        return [
            placement_types.funcol,
            placement_types.shard_dim_alltoall,
            DTensor.full_tensor,
            DTensor.redistribute,
        ]

    def rank_of(rank: int) -> None:
        before = patched()
        with launched(ModelParallelStrategy(parallelize)) as fabric:
            stock_hooks = num_hooks(set_up(fabric, make_lm())[0].module)
        for _ in range(2):
            strategy = TacoTPStrategy(parallelize, compression=EVERYTHING)
            with launched(strategy) as fabric:
                module, optimizer = set_up(fabric, make_lm())
                train(fabric, module, optimizer)
                assert messages(strategy) == {key: 2 for key in STEP}
                assert all(new is not old for new, old in zip(patched(), before, strict=True))
                assert num_hooks(module.module) > stock_hooks
                strategy.teardown()
                assert strategy.session is None
                assert all(new is old for new, old in zip(patched(), before, strict=True))
                assert num_hooks(module.module) == stock_hooks
                fabric.backward(loss_of(module, make_tokens()))  # goes on, uncompressed
                assert messages(strategy) == {}
                strategy.teardown()  # a second one does nothing
                assert not is_installed()

    run_forked(2, rank_of)


def test_end_table_is_printed_once_and_outlives_teardown() -> None:
    def rank_of(rank: int) -> tuple[str, str]:
        texts = []
        for compression in (EVERYTHING, None):
            strategy = TacoTPStrategy(parallelize, compression=compression, sample_every_n_steps=1)
            with launched(strategy) as fabric:
                module, optimizer = set_up(fabric, make_lm())
                train(fabric, module, optimizer)
                strategy.teardown()
                stream = io.StringIO()
                with redirect_stdout(stream):
                    strategy.print_end_table()
                texts.append(stream.getvalue())
        return texts[0], texts[1]

    (table, nothing), others = run_forked(2, rank_of)
    assert table.count("what one rank sent") == 1
    assert "all_reduce, backward" in table
    assert "worst site: " in table
    assert nothing == ""
    assert others == ("", "")


# Other ways to run


@pytest.mark.usefixtures("compiler_is_loaded")
def test_compiled_module_gives_the_same_loss_and_traffic() -> None:
    """Fabric takes torch.compile off, sets the module up and compiles it again."""

    def parallelize_one_block(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        return parallelize_module(model, mesh["tensor_parallel"], make_plan(1, sequence_parallel=False))

    def rank_of(rank: int) -> Any:
        results = []
        for is_compiled in (False, True):
            strategy = TacoTPStrategy(parallelize_one_block, compression=EVERYTHING)
            with launched(strategy) as fabric:
                torch.manual_seed(0)
                model: Any = TinyLm(num_blocks=1)
                model.blocks[0].dropout.p = 0.0
                module, optimizer = set_up(fabric, torch.compile(model, backend="aot_eager") if is_compiled else model)
                losses = train(fabric, module, optimizer)
                total = strategy.compression.traffic.total(outcome="compressed")
                results.append((losses, total.num_messages, total.sent_bytes))
                assert not sessions_in_scope()
        return results

    eager, compiled = run_forked(2, rank_of)[0]
    assert compiled[0] == pytest.approx(eager[0], rel=1e-5)
    assert compiled[1:] == eager[1:]
    assert compiled[1] == 2 * 5


def test_activation_checkpointing_gives_the_same_bits_and_counts_errors_once() -> None:
    def rank_of(rank: int) -> Any:
        found = {}
        for checkpointing in (None, "non-reentrant", "reentrant"):
            strategy = TacoTPStrategy(parallelize, compression=EVERYTHING, sample_every_n_steps=1)
            with launched(strategy) as fabric:
                module = fabric.setup_module(make_lm(checkpointing))
                loss = loss_of(module, make_tokens())
                fabric.backward(loss)
                found[checkpointing] = loss.item(), gradients(module), strategy.compression.errors, messages(strategy)
        plain = found[None]
        for checkpointing in ("non-reentrant", "reentrant"):
            again = found[checkpointing]
            assert again[0] == plain[0], checkpointing
            assert same_bits(again[1], plain[1]), checkpointing
            assert again[2] == plain[2], checkpointing
        return {name: results[3] for name, results in found.items()}

    counts = run_forked(2, rank_of)[0]
    assert counts[None] == STEP
    twice = {key: 2 if key[0].endswith("mlp.down") else 1 for key in STEP}  # what is recomputed travels again
    assert counts["non-reentrant"] == counts["reentrant"] == twice


def test_tensor_parallel_with_fsdp() -> None:
    """Two by two ranks: FSDP2's own traffic stays exact, and off is what one process computes on both batches."""

    def batch(replica: int) -> Tensor:
        return make_tokens().roll(replica, 0) if replica == 0 else (make_tokens() + 1) % 50

    def one_process() -> dict[str, Tensor]:
        model = make_lm().eval()
        (sum(loss_of(model, batch(replica)) for replica in range(2)) / 2).backward()  # type: ignore[union-attr]
        return full_gradients(model)

    def rank_of(rank: int) -> Any:
        results = {}
        for name, compression in (("off", None), ("on", EVERYTHING)):
            strategy = TacoTPStrategy(
                parallelize_and_shard, data_parallel_size=2, tensor_parallel_size=2, compression=compression
            )
            with launched(strategy, devices=4) as fabric:
                module = fabric.setup_module(make_lm())
                for block in module.blocks:
                    block.dropout.p = 0.0
                fabric.backward(loss_of(module, batch(rank // 2)))
                results[name] = full_gradients(module), messages(strategy)
        expected = one_process()
        for name, value in results["off"][0].items():
            torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-7, msg=name)
        whole, exact = (torch.cat([each[name].flatten() for name in expected]) for each in (results["on"][0], expected))
        return ((whole - exact).norm() / exact.norm()).item(), results["on"][1], results["on"][0]

    results = run_forked(4, rank_of)
    for error, counts, found in results:
        assert counts == STEP
        assert 0.001 < error < 0.1
        assert same_bits(found, results[0][2])


PRECISIONS = {
    # Parameters, and the bytes of a step: five exchanges of the residual stream and one of the logits. Under autocast
    # the embedding and what comes back through a linear's own cast are fp32.
    "bf16-mixed": (torch.float32, 4 * 4096 + 2 * 2048 + 800),
    "bf16-true": (torch.bfloat16, 6 * 2048 + 800),
    "16-true": (torch.float16, 6 * 2048 + 800),
}


def test_every_precision_trains_and_compresses_what_it_computes_in() -> None:
    def rank_of(rank: int) -> None:
        for precision, (parameter_dtype, stock_bytes) in PRECISIONS.items():
            losses = []
            for compression in (None, EVERYTHING):
                strategy = TacoTPStrategy(parallelize, compression=compression)
                with launched(strategy, precision=precision) as fabric:
                    module = fabric.setup_module(make_lm())
                    optimizer = fabric.setup_optimizers(torch.optim.SGD(module.parameters(), lr=0.1, foreach=False))
                    losses.append(train(fabric, module, optimizer, num_steps=3))
                    assert {parameter.dtype for parameter in module.parameters()} == {parameter_dtype}
            exact, compressed = losses
            assert strategy.compression.traffic.total().stock_bytes == 3 * stock_bytes, precision
            assert messages(strategy) == {key: 3 * number for key, number in STEP.items()}
            assert compressed == pytest.approx(exact, rel=0.02)
            assert compressed != exact
            assert exact[2] < exact[0]
            assert compressed[2] < compressed[0]

    run_forked(2, rank_of)


def test_loss_that_is_a_dtensor_is_averaged() -> None:
    def rank_of(rank: int) -> float:
        strategy = TacoTPStrategy(parallelize, compression=EVERYTHING)
        with launched(strategy) as fabric:
            fabric.setup_module(make_lm())
            mesh = strategy.device_mesh["tensor_parallel"]
            partial = DTensor.from_local(torch.tensor(1.0 + rank), mesh, [Partial()], run_check=False)
            return fabric.all_reduce(partial, reduce_op="mean").item()  # type: ignore[union-attr]

    assert run_forked(2, rank_of) == [3.0, 3.0]


def test_one_rank_has_nothing_to_compress_and_no_warning() -> None:
    def rank_of(rank: int) -> Any:
        strategy = TacoTPStrategy(parallelize, compression=EVERYTHING)
        with launched(strategy, devices=1) as fabric, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            module, optimizer = set_up(fabric, make_lm())
            losses = train(fabric, module, optimizer)
            texts = [str(each.message) for each in caught if "lightning_taco" in str(each.message)]
            return losses, texts, messages(strategy)

    ((losses, texts, counts),) = run_forked(1, rank_of)
    assert len(losses) == 2
    assert texts == []
    assert counts == {}


# Refused before any process is started


def make_fabric(**settings: Any) -> Fabric:
    return Fabric(accelerator="cpu", devices=2, strategy=TacoTPStrategy(parallelize, **settings))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: make_fabric(tensor_parallel_size=3),
            r"data_parallel_size=1 x tensor_parallel_size=3 needs 3 processes, but this run has 2 "
            r"\(num_nodes=1 x devices=2\). Use tensor_parallel_size=2",
        ),
        (lambda: make_fabric(data_parallel_size=2), "data_parallel_size=2 x tensor_parallel_size=2 needs 4 processes"),
        (lambda: make_fabric(tensor_parallel_size=0), "tensor_parallel_size=0 is below 1"),
        (lambda: make_fabric(compression="taco2"), "compression='taco2' is not a recipe; use one of 'default', 'taco'"),
        (lambda: make_fabric(compression={"min_bites": 1}), "compression has no field 'min_bites'; it has"),
        (lambda: make_fabric(timeout=0), "timeout=0 is not above zero; give seconds"),
        (lambda: make_fabric(sample_every_n_steps=-1), "sample_every_n_steps=-1 is not a number of steps"),
    ],
)
def test_impossible_argument_is_refused(make: Callable[[], Fabric], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_mps_is_refused() -> None:
    strategy = TacoTPStrategy(parallelize)
    strategy.parallel_devices = [torch.device("mps", 0), torch.device("mps", 1)]
    with pytest.raises(ValueError, match=r"accelerator 'mps' is not supported: .* Use accelerator=\"gpu\""):
        strategy._configure_launcher()


def test_unknown_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    with pytest.raises(RuntimeError, match=r"torch 2\.99\.0 is installed, but lightning_taco"):
        TacoTPStrategy(parallelize)
    TacoTPStrategy(parallelize, compression=None)  # nothing is patched


def test_timeout_is_seconds_or_a_duration() -> None:
    for timeout in (600, 600.0, timedelta(minutes=10)):
        assert TacoTPStrategy(parallelize, timeout=timeout)._timeout == timedelta(minutes=10)


def test_public_name() -> None:
    assert lightning_taco.fabric.TacoTPStrategy is TacoTPStrategy
    assert not isinstance(TacoTPStrategy(parallelize), lightning_taco.TacoTPStrategy)
