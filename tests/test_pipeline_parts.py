"""The parts of pipelines that need no rank: settings, where a model is cut, batches, codecs, schedules, arguments."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_taco import PipelineConfig, TacoTPStrategy
from lightning_taco.collectives.traffic import TrafficCounters
from lightning_taco.config import CodecConfig
from lightning_taco.pipeline_parallel import (
    SCHEDULES,
    BlockCodec,
    LayerOfAnotherStage,
    check_num_microbatches,
    cut,
    make_layout,
    resolve_pipeline,
    whole_names,
    wire,
)
from lightning_taco.pipeline_parallel.agreement import structure_of
from lightning_taco.pipeline_parallel.answering import answered, heard_inputs
from lightning_taco.pipeline_parallel.layers import balanced, find_pipelined, first_layers, read_layers
from lightning_taco.pipeline_parallel.microbatches import batch_size_of, cut_batch, merged
from lightning_taco.pipeline_parallel.schedules import num_usable
from lightning_taco.pipeline_parallel.transfers import Border, Counts, Moment, TensorSpec
from lightning_taco.strategies import checks
from lightning_taco.strategies.pipeline_arguments import checked_pipeline
from tests.pipeline_models import Chain, Holder


def refusal(run: Callable[[], Any]) -> str:
    with pytest.raises((TypeError, ValueError, RuntimeError)) as caught:
        run()
    return str(caught.value)


# Settings


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"forward": "tahquant"}, "forward='tahquant' is not the name of a codec"),
        ({"forward": 8}, "forward=8 is neither a CodecConfig, a name nor None"),
        ({"backward": CodecConfig(element="auto")}, "backward.element='auto' would have to be agreed"),
        ({"backward": CodecConfig(reshape="calibrated")}, "backward has reshape='calibrated'"),
        ({"min_bytes": -1}, "min_bytes=-1 is not a number of bytes"),
        ({"min_bytes": True}, "min_bytes=True is not a number of bytes"),
        ({"during_validation": 1}, "during_validation=1 is not a boolean"),
        ({"seed": 1 << 31}, "seed=2147483648 is out of range"),
    ],
)
def test_impossible_settings_are_refused(fields: dict[str, Any], text: str) -> None:
    assert text in refusal(lambda: PipelineConfig(**fields))


def test_settings_from_what_a_user_may_pass() -> None:
    assert resolve_pipeline(None) is None
    assert resolve_pipeline("none") is None
    assert resolve_pipeline(PipelineConfig(forward=None, backward=None)) is None
    assert resolve_pipeline("int8") == PipelineConfig()
    few = resolve_pipeline({"forward": {"element": "int4"}, "backward": None, "min_bytes": 5})
    assert few == PipelineConfig(forward=CodecConfig(element="int4"), backward=None, min_bytes=5)
    four = resolve_pipeline("int4")
    assert four is not None
    assert isinstance(four.backward, CodecConfig)
    assert four.backward.rounding == "stochastic"
    assert "'int2' is not a recipe; use one of 'tah_quant', 'int8', 'int4', 'none'" in refusal(
        lambda: resolve_pipeline("int2")
    )
    assert "has type float" in refusal(lambda: resolve_pipeline(0.5))  # type: ignore[arg-type]
    assert "pipeline_compression has no field 'bits'" in refusal(lambda: resolve_pipeline({"bits": 4}))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"pipeline_parallel_size": 0}, "pipeline_parallel_size=0 is below 1"),
        ({"pipeline_parallel_size": 2.0}, "pipeline_parallel_size=2.0 is not an integer"),
        ({"num_microbatches": 0}, "num_microbatches=0 is below 1"),
        ({"pipeline_schedule": "2F2B"}, "pipeline_schedule='2F2B' is not known; use one of 'GPipe', '1F1B'"),
        ({"pipeline_parallel_size": 2, "pipeline_split": [0]}, "an index of pipeline_split=0 is below 1"),
        ({"pipeline_parallel_size": 2, "pipeline_split": [1, 2]}, "1F1B needs one for each rank; give 1 indices"),
        (
            {"pipeline_parallel_size": 2, "pipeline_schedule": "ZBVZeroBubble", "data_parallel": "quangrad"},
            "past what keeps them in few bits",
        ),
        (
            {"pipeline_parallel_size": 4, "pipeline_schedule": "Interleaved1F1B", "num_microbatches": 9},
            "num_microbatches=9 does not go; use 8 or 12",
        ),
    ],
)
def test_impossible_arguments_are_refused_before_any_process(arguments: dict[str, Any], text: str) -> None:
    assert text in refusal(lambda: TacoTPStrategy(**arguments))


def test_sizes_that_do_not_multiply_to_the_processes_are_refused_with_a_remedy() -> None:
    def check(data: Any, pipeline: int, tensor: Any, world: int) -> None:
        checks.check_mesh_sizes(data, tensor, world, pipeline_parallel_size=pipeline)

    check(2, 2, 2, 8)
    check(1, 2, "auto", 8)
    assert checks.resolved_sizes("auto", "auto", 16, 2, 2) == (2, 4)
    text = refusal(lambda: check(1, 2, 2, 8))
    assert "data_parallel_size=1 x pipeline_parallel_size=2 x tensor_parallel_size=2 needs 4 processes" in text
    assert "Use data_parallel_size=2," in text
    assert "Use tensor_parallel_size=4," in refusal(lambda: check(1, 2, 3, 8))


def test_callbacks_that_need_the_whole_model_are_refused() -> None:
    from lightning.pytorch.callbacks import EMAWeightAveraging

    from lightning_taco.callbacks import CompressionMonitor, ThroughputReport

    checks.check_pipeline_callbacks([CompressionMonitor()])
    text = refusal(lambda: checks.check_pipeline_callbacks([EMAWeightAveraging()]))
    assert "EMAWeightAveraging copies the whole model on each rank" in text
    assert "a stage waits for others" in refusal(lambda: checks.check_pipeline_callbacks([ThroughputReport()]))


# Layers and cuts


@pytest.mark.parametrize(
    ("weights", "parts", "expected"),
    [
        ([1], 1, (0,)),
        ([1, 1, 1, 1], 2, (0, 2)),
        ([9, 1, 1, 1], 2, (0, 1)),
        ([1, 1, 1, 9], 2, (0, 3)),
        ([0, 0, 0], 3, (0, 1, 2)),
        ([5, 1, 1, 1, 5], 3, (0, 1, 4)),
        ([3, 3, 3, 1, 1, 1, 3], 3, (0, 2, 4)),
    ],
)
def test_balanced_cuts(weights: list[int], parts: int, expected: tuple[int, ...]) -> None:
    found = balanced(weights, parts)
    assert len(found) == parts
    assert _largest(weights, found) == _largest(weights, expected)


def _largest(weights: list[int], bounds: tuple[int, ...]) -> int:
    ends = (*bounds[1:], len(weights))
    assert all(start < end for start, end in zip(bounds, ends, strict=True))
    return max(sum(weights[start:end]) for start, end in zip(bounds, ends, strict=True))


def test_balanced_is_the_best_of_all_cuts() -> None:
    from itertools import combinations

    generator = torch.Generator().manual_seed(0)
    for _ in range(30):
        weights = torch.randint(0, 20, (7,), generator=generator).tolist()
        best = min(_largest(weights, (0, *ends)) for ends in combinations(range(1, 7), 2))
        assert _largest(weights, balanced(weights, 3)) == best


def test_a_split_must_fit_the_layers() -> None:
    layers = read_layers(Chain(4))
    assert first_layers(layers, 2, [1]) == (0, 1)
    for split, stages in (([1, 1], 3), ([6], 2), ([0], 2), ([1, 2], 2)):
        assert "does not cut 6 layers into" in refusal(lambda: first_layers(layers, stages, split))  # noqa: B023
    assert "has 6 layers, but 7 pipeline stages" in refusal(lambda: first_layers(layers, 7, None))


class Stray(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))


class Wrong(Chain):
    def pipeline_layers(self) -> list[Any]:
        return [self.embedding, "head"]


def test_models_that_cannot_be_cut_are_refused() -> None:
    layout = make_layout("1F1B", 2)
    assert "no module of it has a method pipeline_layers()" in refusal(lambda: find_pipelined(nn.Linear(1, 1)))
    two = nn.ModuleList([Chain(), Chain()])
    assert "Several modules have a method pipeline_layers(): 0, 1" in refusal(lambda: find_pipelined(two))
    assert "scale of Stray is in no layer" in refusal(lambda: cut(Stray(), layout, 0))
    assert "pipeline_layers()[1] is 'head'" in refusal(lambda: cut(Wrong(), layout, 0))
    tied = refusal(lambda: cut(Chain(tied=True), layout, 0))
    assert "embedding.weight and head.weight are one parameter (tied weights)" in tied
    cut(Chain(tied=True), make_layout("ZBVZeroBubble", 2), 0)
    compiled = Holder(torch.compile(Chain(), backend="eager"))  # type: ignore[arg-type]
    assert "is compiled as a whole" in refusal(lambda: find_pipelined(compiled))


def test_a_cut_leaves_the_names_of_the_whole_model() -> None:
    whole = [name for name, _ in Holder(Chain(5)).named_parameters()]
    left: list[str] = []
    for rank in range(3):
        holder = Holder(Chain(5))
        made = cut(holder, make_layout("1F1B", 3), rank)
        assert cut(holder, make_layout("1F1B", 3), rank) is made, "a second time nothing happens"
        assert whole_names(holder) == whole
        left += [name for name, _ in holder.named_parameters()]
        assert len(holder.model.blocks) == 5
    assert left == whole
    assert "build a new LightningModule" in refusal(lambda: cut(holder, make_layout("GPipe", 3), 2))
    gone = holder.model.embedding
    assert isinstance(gone, LayerOfAnotherStage)
    assert "A layer of pipeline stage 0 was called on a rank of another stage" in refusal(lambda: gone(None))


# Steps that are listened to and answered


def test_a_step_is_heard_and_answered_and_the_model_is_back_afterwards() -> None:
    holder, model = Holder(Chain()), None
    model = holder.model
    batch = torch.tensor([[1, 2]])
    (heard,) = heard_inputs(holder, model, lambda root: Holder.step(root, batch))
    assert heard is batch
    assert holder.model is model

    def step(root: Any) -> Tensor:
        assert isinstance(root.model, Chain), "it still is what it was"
        assert root.model.head is model.head
        return root.model(batch) * 2

    assert answered(holder, model, torch.ones(3), step).tolist() == [2, 2, 2]
    assert holder.model is model

    class Whole(Chain):
        def step(self) -> Any:
            return self(batch)

    whole = Whole()
    assert heard_inputs(whole, whole, lambda root: root.step())[0] is batch
    assert answered(whole, whole, 5, lambda root: root.step()) == 5

    def fails(root: Any) -> None:
        raise KeyError("before the model")

    with pytest.raises(KeyError):
        heard_inputs(holder, model, fails)
    assert holder.model is model


# Batches and results


def test_batches_are_cut_and_put_together() -> None:
    batch = {"x": torch.arange(12).view(6, 2), "y": (torch.arange(6), None), "factor": 0.5, "scalar": torch.ones(())}
    assert batch_size_of(batch) == 6
    parts = cut_batch(batch, 3)
    assert [part["y"][0].tolist() for part in parts] == [[0, 1], [2, 3], [4, 5]]
    assert all(part["factor"] == 0.5 and part["scalar"].item() == 1 and part["y"][1] is None for part in parts)
    assert torch.equal(torch.cat([part["x"] for part in parts]), batch["x"])
    assert parts[0]["x"].data_ptr() == batch["x"].data_ptr(), "no copy"
    assert "this one has no tensor" in refusal(lambda: batch_size_of({"a": 3}))
    assert "this one has 2, 3" in refusal(lambda: batch_size_of([torch.ones(2), torch.ones(3)]))
    assert "holds a str" in refusal(lambda: batch_size_of([torch.ones(2), "a"]))


def test_results_of_microbatches_are_merged() -> None:
    results = [{"loss": torch.tensor(float(i)), "rows": torch.full((2, 1), i), "n": i, "name": "a"} for i in range(3)]
    together = merged(results)
    assert together["loss"].item() == 1
    assert together["rows"].flatten().tolist() == [0, 0, 1, 1, 2, 2]
    assert (together["n"], together["name"]) == (1, "a")
    assert merged([None, None]) is None
    half = merged([torch.tensor(1.0, dtype=torch.bfloat16), torch.tensor(1.0078125, dtype=torch.bfloat16)])
    assert half.dtype == torch.bfloat16
    assert "returned a object" in refusal(lambda: merged([object(), object()]))
    assert "of another structure" in refusal(lambda: merged([[1], [1, 2]]))


def test_a_structure_is_the_same_for_other_values_only() -> None:
    one = structure_of({"a": torch.ones(2), "b": 1.0})
    assert one == structure_of({"a": torch.zeros(2), "b": 2.0})
    others = [{"a": torch.ones(3), "b": 1.0}, {"a": torch.ones(2).double(), "b": 1.0}, {"a": torch.ones(2), "b": 1}]
    assert len({one.key, *(structure_of(other).key for other in others)}) == 4


# Codecs for transfers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(2, 8, 64), (1,), (3, 5, 7), (0, 4)])
def test_block_codecs_have_the_size_they_announce(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    for element, bound in (("int8", 0.02), ("int4", 0.25), ("e4m3", 0.05)):
        codec = BlockCodec(CodecConfig(element=element))  # type: ignore[arg-type]
        if not tensor.numel():
            continue
        message = codec.encode(tensor, seed=3)
        assert message.dtype == torch.uint8
        assert message.shape == (codec.message_bytes(tensor.shape, dtype),)
        decoded = codec.decode(message, tensor.shape, dtype)
        assert (decoded.shape, decoded.dtype) == (tensor.shape, dtype)
        assert (decoded.float() - tensor.float()).norm() <= bound * tensor.float().norm()


class AsHalf:
    """A codec for transfers by name: two bytes a value."""

    def message_bytes(self, shape: torch.Size, dtype: torch.dtype) -> int:
        return 2 * shape.numel()

    def encode(self, tensor: Tensor, *, seed: int = 0) -> Tensor:
        return tensor.to(torch.bfloat16).reshape(-1).view(torch.uint8)

    def decode(self, message: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        return message.view(torch.bfloat16).view(shape).to(dtype)


def test_a_codec_by_name_packs_what_may_be_compressed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(wire.NAMED_CODECS, "as_half", AsHalf())
    config = PipelineConfig(forward="as_half", backward=None, min_bytes=0)  # type: ignore[arg-type]
    counts = Counts(TrafficCounters(), TrafficCounters())
    spec = TensorSpec(torch.Size((2, 3)), torch.float32, True)
    border = Border(0, "stage_0_to_1/x", [spec, spec._replace(dtype=torch.int64, requires_grad=False)], config, counts)
    values = [torch.arange(6.0).view(2, 3), torch.arange(6).view(2, 3)]
    messages = border.pack(values, "forward", Moment(0, 0), torch.device("cpu"))
    assert [message.numel() for message in messages] == [12, 48], "integers as they are"
    found = border.unpack(messages, "forward", torch.device("cpu"))
    assert all(torch.equal(one, other) for one, other in zip(found, values, strict=True))  # type: ignore[arg-type]
    gradients = border.pack([None, None], "backward", Moment(0, 0), torch.device("cpu"))
    assert [gradient.count_nonzero().item() for gradient in gradients] == [0], "zeros, and nothing for integers"
    text = refusal(lambda: border.pack([values[0].double(), values[1]], "forward", Moment(0, 0), torch.device("cpu")))
    assert "gives float64 [2, 3], int64 [2, 3], but float32 [2, 3], int64 [2, 3] was agreed" in text
    assert border.seed("forward", 0, Moment(1, 0)) != border.seed("forward", 0, Moment(1, 1))


# Schedules


def test_layouts() -> None:
    assert make_layout("1F1B", 3).ranks == (0, 1, 2)
    assert make_layout("Interleaved1F1B", 2).ranks == (0, 1, 0, 1)
    assert make_layout("LoopedBFS", 2, 6).ranks == (0, 1, 0, 1, 0, 1)
    assert make_layout("ZBVZeroBubble", 3).ranks == (0, 1, 2, 2, 1, 0)
    assert make_layout("ZBVZeroBubble", 3).stages_of(1) == [1, 4]
    assert "ZBVZeroBubble needs two for each rank; give 3 indices" in refusal(
        lambda: make_layout("ZBVZeroBubble", 2, 6)
    )
    assert "needs two or more for each rank" in refusal(lambda: make_layout("LoopedBFS", 2, 2))
    assert checked_pipeline(1, "ZBVZeroBubble", None, None, None).num_stages is None


def test_numbers_of_microbatches() -> None:
    for schedule in SCHEDULES:
        layout = make_layout(schedule, 2)
        assert num_usable(8, 4, layout) == 4
        assert num_usable(8, 3, layout) == 2
        assert num_usable(7, 4, layout) == 1
        assert num_usable(2, 4, layout) == 2
    assert num_usable(9, 9, make_layout("Interleaved1F1B", 4)) == 3, "rounds of four leave one over"
    check_num_microbatches(8, make_layout("Interleaved1F1B", 4))
