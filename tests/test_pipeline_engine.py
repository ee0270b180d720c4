"""Pipelines against one process, over forked gloo ranks: schedules, shapes, codecs, and what must end on all ranks."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lightning_taco.config import CodecConfig
from lightning_taco.pipeline_parallel import SCHEDULES, PipelineConfig, resolve_pipeline
from lightning_taco.strategies.gradients import clip_gradients_by_norm, gradient_norm
from tests.pipeline_models import WIDTH, Chain, Holder, Residual, make_engine, one_process, tokens, train_step
from tests.ranks import run_forked

EVERYTHING = PipelineConfig(min_bytes=0)


def largest_difference(holder: nn.Module, expected: dict[str, Tensor]) -> float:
    return max((each.grad - expected[name]).abs().max().item() for name, each in holder.named_parameters())


def raised(run: Callable[[], Any]) -> str:
    try:
        run()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def step_twice(schedule: str, num_microbatches: int, batch_size: int, num_blocks: int) -> tuple[float, float, int]:
    """Largest deviation of loss and gradients, in a first and in a second step, and the parameters of this rank."""
    batch = tokens(batch_size)
    loss, gradients = one_process(lambda: Chain(num_blocks), batch)
    holder = Holder(Chain(num_blocks))
    engine = make_engine(holder, schedule, num_microbatches)
    first = abs(train_step(engine, batch) - loss)
    holder.zero_grad()
    second = abs(train_step(engine, batch) - loss)
    return max(first, second), largest_difference(holder, gradients), len(list(holder.parameters()))


# num_microbatches, samples: divided evenly; one micro-batch; a batch that is no multiple; fewer samples than asked for.
CASES = ((4, 8), (1, 4), (3, 8), (8, 6))


def test_every_schedule_gives_the_loss_and_the_gradients_of_one_process() -> None:
    def check(rank: int) -> dict[Any, tuple[float, float, int]]:
        odd = {(name, case): step_twice(name, *case, 5) for name in ("1F1B", "ZBVZeroBubble") for case in CASES[1:]}
        return odd | {(name, CASES[0]): step_twice(name, *CASES[0], 5) for name in SCHEDULES}

    by_rank = run_forked(2, check)
    for result in by_rank:
        for name, (loss, gradient, _) in result.items():
            assert loss < 1e-6, name
            assert gradient < 1e-6, name
    counts = [sum(result[name][2] for result in by_rank) for name in by_rank[0]]
    assert counts == [len(list(Chain(5).parameters()))] * len(counts), "each parameter is on one rank"


def test_four_stages_with_uneven_layers() -> None:
    def check(rank: int) -> list[tuple[float, float, int]]:
        return [step_twice(name, count, 8, 7) for name, count in (("1F1B", 4), ("1F1B", 2), ("ZBVZeroBubble", 4))]

    for result in run_forked(4, check):
        assert all(loss < 1e-6 and gradient < 1e-6 for loss, gradient, _ in result)


class SeveralTensors(nn.Module):
    """Hands on three tensors, one of them integers and one a single value."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(24, WIDTH)
        self.block = Residual()

    def pipeline_layers(self) -> list[Any]:
        return [(self.first, self.embedding), (self.middle, self.block), (self.last,)]

    def first(self, batch: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.embedding(batch), batch, self.embedding.weight.mean()

    def middle(self, hidden: Tensor, batch: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.block(hidden), batch, scale

    def last(self, hidden: Tensor, batch: Tensor, scale: Tensor) -> Tensor:
        table = torch.linspace(-1, 1, 24 * WIDTH).view(24, WIDTH)
        return hidden @ table.T * (1 + scale) + F.one_hot(batch, 24)

    def forward(self, batch: Tensor) -> Tensor:
        return self.last(*self.middle(*self.first(batch)))


def test_several_tensors_and_integers_cross_a_border() -> None:
    def check(rank: int) -> tuple[float, float, set[str]]:
        batch = tokens()
        loss, gradients = one_process(SeveralTensors, batch)
        holder = Holder(SeveralTensors())
        found = train_step(make_engine(holder, "1F1B", 4, None, [1]), batch)
        compressed = make_engine(Holder(SeveralTensors()), "1F1B", 4, EVERYTHING, [1])
        train_step(compressed, batch)
        outcomes = {key.outcome for key in compressed.counts.sent.counts}
        return abs(found - loss), largest_difference(holder, gradients), outcomes

    results = run_forked(2, check)
    assert all(loss < 1e-6 and gradient < 1e-6 for loss, gradient, _ in results)
    assert results[0][2] == {"compressed", "dtype int64"}
    assert results[1][2] == {"compressed"}, "no gradient of integers"


def test_frozen_stages() -> None:
    def check(rank: int) -> list[float]:
        batch, found = tokens(), []
        for names in (("embedding", "blocks.0"), ("norm", "head", "blocks.2", "blocks.3"), ("blocks.1",)):

            def make(names: tuple[str, ...] = names) -> Chain:
                model = Chain()
                for name in names:
                    model.get_submodule(name).requires_grad_(False)
                return model

            loss, gradients = one_process(make, batch)
            for schedule in ("1F1B", "ZBVZeroBubble"):
                holder = Holder(make())
                found.append(abs(train_step(make_engine(holder, schedule), batch) - loss))
                for name, each in holder.named_parameters():
                    assert (each.grad is None) == (name not in gradients), name
                    if each.grad is not None:
                        found.append((each.grad - gradients[name]).abs().max().item())
        return found

    for result in run_forked(2, check):
        assert max(result) < 1e-6


def test_compressed_transfers_have_the_bytes_and_the_error_of_their_codec() -> None:
    bits = {"int8": 8.25, "int4": 4.25}

    def check(rank: int) -> dict[str, Any]:
        batch = tokens(16, 16)
        loss, gradients = one_process(Chain, batch)
        found: dict[str, Any] = {}
        for name in bits:
            base = resolve_pipeline(name)
            assert base is not None
            config = PipelineConfig(forward=base.forward, backward=base.backward, min_bytes=0)
            holder = Holder(Chain())
            engine = make_engine(holder, "1F1B", 4, config)
            deviation = abs(train_step(engine, batch) - loss) / loss
            worst = max(
                ((each.grad - gradients[key]).norm() / gradients[key].norm()).item()
                for key, each in holder.named_parameters()
            )
            sent = engine.counts.sent.total(outcome="compressed")
            found[name] = deviation, worst, 8 * sent.sent_bytes / (sent.stock_bytes / 4), sent.num_messages
        return found

    for result in run_forked(2, check):
        for name, (loss, gradient, found_bits, num_messages) in result.items():
            assert num_messages == 4, name
            assert found_bits == pytest.approx(bits[name]), name
            assert loss < {"int8": 1e-4, "int4": 1e-2}[name]
            assert 0 < gradient < {"int8": 0.03, "int4": 0.45}[name], "compressed, and no worse than its codec"


def test_random_rounding_differs_by_microbatch_and_step_and_repeats() -> None:
    def check(rank: int) -> list[Tensor]:
        codec = CodecConfig(element="int4", rounding="stochastic")
        same = tokens(1, 8).expand(4, -1).contiguous()
        found = []
        for _ in range(2):
            holder = Holder(Chain())
            engine = make_engine(holder, "GPipe", 4, PipelineConfig(forward=codec, backward=codec, min_bytes=0))
            outputs: list[Tensor] = []

            def step(root: Any, part: Tensor, outputs: list[Tensor] = outputs) -> Tensor:
                logits = root.model(part)
                outputs.append(logits.detach())
                return logits.sum()

            for _ in range(2):
                engine.run(same, step, is_training=True, loss_of=lambda loss: loss)
            found += outputs
        return found

    outputs = run_forked(2, check)[1]
    assert len(outputs) == 16
    first, again = outputs[:8], outputs[8:]
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True)), "a run repeats"
    assert len({one.numpy().tobytes() for one in first}) == 8, "other bits for each micro-batch and step"


def test_nonfinite_values_stay_nonfinite() -> None:
    def check(rank: int) -> list[bool]:
        found = []
        for value in (float("nan"), float("inf"), float("-inf")):
            model = Chain()
            with torch.no_grad():
                model.embedding.weight[3] = value
            engine = make_engine(Holder(model), "1F1B", 4, EVERYTHING)
            found.append(torch.isfinite(torch.tensor(train_step(engine, torch.full((4, 6), 3)))).item())
        return found

    assert run_forked(2, check) == [[False] * 3] * 2


def test_batches_of_other_shapes_follow_each_other() -> None:
    def check(rank: int) -> list[float]:
        engine = make_engine(Holder(Chain()), "1F1B", 4)
        shapes = ((8, 6), (4, 3), (8, 6), (2, 1), (5, 7))
        return [abs(train_step(engine, tokens(*shape)) - one_process(Chain, tokens(*shape))[0]) for shape in shapes]

    for result in run_forked(2, check):
        assert max(result) < 1e-6


class Moody(nn.Module):
    """Fails, or returns another shape, in the second micro-batch of training."""

    def __init__(self, mood: str) -> None:
        super().__init__()
        self.mood, self.linear = mood, nn.Linear(WIDTH, WIDTH)
        self.calls = 0

    def forward(self, hidden: Tensor) -> Tensor:
        self.calls += self.training
        if self.calls == 2 and self.mood == "raises":
            raise RuntimeError("the second micro-batch is one too many")
        if self.calls == 2 and self.mood == "shrinks":
            return self.linear(hidden)[:, :-1]
        return self.linear(hidden)


def test_a_stage_that_raises_ends_all_ranks_with_its_message() -> None:
    def check(rank: int) -> list[str]:
        texts = []
        for place, mood in ((0, "raises"), (3, "raises"), (0, "shrinks")):
            for schedule in ("1F1B", "ZBVZeroBubble"):
                model = Chain()
                model.blocks[place] = Moody(mood)
                engine = make_engine(Holder(model), schedule, 4)
                texts.append(raised(lambda: train_step(engine, tokens())))  # noqa: B023
        return texts

    results = run_forked(2, check)
    for one, other in zip(*results, strict=True):
        texts = sorted((one, other), key=lambda text: text.startswith("StageFailedError"))
        wanted = "one too many" if "one too many" in texts[0] else "but float32 [2, 6, 16] was agreed"
        assert wanted in texts[0]
        assert texts[1].startswith("StageFailedError: The pipeline ends, since a stage failed: rank ")
        assert wanted in texts[1]
        assert "micro-batch 1" in texts[1]


def test_what_cannot_run_is_refused_on_all_ranks_before_the_first_send() -> None:
    def step_without_model(root: Any, part: Tensor) -> Tensor:
        return part.float().sum()

    def step_twice_called(root: Any, part: Tensor) -> Tensor:
        return (root.model(part) + root.model(part)).sum()

    def step_of_other_lengths(root: Any, part: Tensor) -> Tensor:
        return root.model(part[:, : 3 + int(part[0, 0]) % 2]).sum()

    def step_with_keyword(root: Any, part: Tensor) -> Tensor:
        return root.model(tokens=part).sum()

    def check(rank: int) -> dict[str, str]:
        engine = make_engine(Holder(Chain()), "1F1B", 4)

        def run(batch: Any, step: Any = Holder.step) -> str:
            return raised(lambda: engine.run(batch, step, is_training=True, loss_of=lambda loss: loss))

        found = {
            "empty": run(tokens(8)[:0]),
            "sizes": run({"a": tokens(8), "b": tokens(6)}),
            "text": run([tokens(8), "words"]),
            "not called": run(tokens(), step_without_model),
            "twice": run(tokens(), step_twice_called),
            "keyword": run(tokens(), step_with_keyword),
            "lengths": run(torch.arange(8).view(8, 1).expand(8, 5).contiguous() // 2, step_of_other_lengths),
            "other batch": run(tokens(8, 6 + rank)),
            "one rank only": run(tokens(8) if rank else tokens(8)[:0]),
            "too large a token": run(tokens() + 1000),
            "fresh": run(tokens(8, 5) + 1000),
        }
        assert abs(train_step(engine, tokens()) - one_process(Chain, tokens())[0]) < 1e-6, "and goes on"
        return found

    for result in run_forked(2, check):
        assert "this one has 0" in result["empty"]
        assert "one first dim, at least 1" in result["sizes"]
        assert "holds a str" in result["text"]
        assert "has not called Chain" in result["not called"]
        assert "called twice in one step" in result["twice"]
        assert "keyword arguments tokens" in result["keyword"]
        assert "the model is given int64 [2, 3] in one and int64 [2, 4] in another" in result["lengths"]
        assert "must get the same batch" in result["other batch"]
        assert "[8, 7]" in result["other batch"]
        assert "this one has 0" in result["one rank only"]
        assert "IndexError" in result["too large a token"]
        assert "Pipeline stage 0 cannot run the first micro-batch: IndexError" in result["fresh"]


def test_a_model_that_fsdp_has_sharded_as_a_whole_cannot_be_cut() -> None:
    def check(rank: int) -> str:
        model = Chain()
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        return raised(lambda: make_engine(Holder(model)))

    for text in run_forked(2, check):
        assert "self.trainer.strategy.cut_for_pipeline(model) in configure_model, before fully_shard" in text


def test_evaluation_gives_every_rank_what_the_step_returned() -> None:
    batch = tokens(6)
    expected = Chain()(batch)

    def step(root: Any, part: Tensor) -> dict[str, Any]:
        logits = root.model(part)
        return {"logits": logits, "size": len(part), "first": logits.flatten()[0], "name": "x", "none": None}

    def check(rank: int) -> list[Any]:
        found = []
        for schedule in ("1F1B", "ZBVZeroBubble", "Interleaved1F1B"):
            engine = make_engine(Holder(Chain()), schedule, 3)
            with torch.no_grad():
                found += [engine.run(batch, step, is_training=False)[0].result for _ in range(2)]
        return found

    for results in run_forked(2, check):
        for result in results:
            torch.testing.assert_close(result["logits"], expected.detach())
            assert (result["size"], result["name"], result["none"]) == (2, "x", None)
            firsts = torch.stack([expected[2 * part].flatten()[0] for part in range(3)])
            torch.testing.assert_close(result["first"], firsts.mean().detach())


def test_norms_over_stages_are_those_of_the_whole_model() -> None:
    orders = (1.0, 2.0, math.inf)

    def check(rank: int) -> list[float]:
        _, gradients = one_process(Chain, tokens())
        whole = torch.cat([each.flatten() for each in gradients.values()])
        holder = Holder(Chain())
        engine = make_engine(holder, "1F1B")
        train_step(engine, tokens())
        group, parameters = engine.agreement.group, list(holder.parameters())
        found = [
            abs(gradient_norm(parameters, order, pipeline=group).item() / whole.norm(order).item() - 1)
            for order in orders
        ]
        norm = clip_gradients_by_norm(parameters, 0.1, pipeline=group).item()
        found.append(abs(norm / whole.norm().item() - 1))
        found.append(abs(gradient_norm(parameters, pipeline=group).item() / 0.1 - 1))
        if rank:
            parameters[0].grad[0] = math.nan  # type: ignore[index]
        for order in orders:
            assert math.isnan(gradient_norm(parameters, order, pipeline=group).item())
        nothing = gradient_norm([] if rank else parameters, pipeline=group).item()
        assert nothing == pytest.approx(gradient_norm(parameters).item()) if rank == 0 else nothing > 0
        return found

    assert max(map(max, run_forked(2, check))) < 1e-5


def test_random_numbers_of_a_step_are_the_same_where_it_is_heard_and_answered() -> None:
    """Noise that a step adds to its input and takes part in its loss: the loss knows whether both are the same."""
    drawn: list[Tensor] = []

    class Echo(Chain):
        def pipeline_layers(self) -> list[Any]:
            return [(self.first, self.embedding, self.blocks), (self.last, self.norm, self.head)]

        def first(self, noise: Tensor) -> Tensor:
            return noise + 0 * self.embedding.weight.sum()

        def last(self, hidden: Tensor) -> Tensor:
            return hidden + 0 * self.norm.weight.sum()

    def step(root: Any, part: Tensor) -> Tensor:
        noise = torch.randn(part.shape)
        output = root.model(noise)
        drawn.append(noise)
        return (output - noise).abs().sum()

    def check(rank: int) -> tuple[float, bool, int]:
        torch.manual_seed(7)
        torch.rand(rank + 1)  # generators have come apart
        engine = make_engine(Holder(Echo()), "1F1B", 2, split=[1])
        engine_state = torch.get_rng_state()
        losses = [engine.run(tokens(4), step, is_training=True, loss_of=lambda loss: loss)[0].result for _ in range(2)]
        assert torch.equal(engine_state, torch.get_rng_state())
        return sum(losses).item(), len({noise.numpy().tobytes() for noise in drawn}) == len(drawn), len(drawn)

    assert run_forked(2, check) == [(0.0, True, 0), (0.0, True, 4)]


def test_autocast_and_its_backward_are_those_of_one_process() -> None:
    def check(rank: int) -> float:
        batch = tokens()
        holder = Holder(Chain())
        for part in batch.chunk(4):
            with torch.autocast("cpu", torch.bfloat16):
                loss = holder.step(part) / 4
            loss.backward()
        expected = {name: each.grad for name, each in holder.named_parameters()}
        holder = Holder(Chain())
        engine = make_engine(holder, "GPipe", 4)
        with torch.autocast("cpu", torch.bfloat16):
            train_step(engine, batch)
        return largest_difference(holder, expected)

    assert max(run_forked(2, check)) < 1e-6
