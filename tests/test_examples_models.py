"""The example models: split over any number of ranks they give the loss and every gradient of the whole model."""

import itertools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor.parallel import loss_parallel
from torch.utils._python_dispatch import TorchDispatchMode

from examples import gpt, llama
from examples.language_module import LanguageModule, lr_fraction
from examples.plans import materialize, next_token_loss, shard_data_parallel
from examples.text_data import TextDataModule
from lightning_taco.pipeline_parallel.layers import read_layers
from tests.ranks import run_forked, run_threads

VOCAB = 37  # no multiple of 2 or 4: the last rank holds fewer rows
GPT_SIZES: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_heads": 4,
    "sequence_length": 16,
    "vocab_size": VOCAB,
}
LLAMA_SIZES: dict[str, Any] = {**GPT_SIZES, "num_heads": 8, "num_kv_heads": 4, "ffn_size": 24}


def build(kind: str, **overrides: Any) -> nn.Module:
    if kind == "gpt":
        return gpt.GPT(gpt.GPTConfig(**{**GPT_SIZES, **overrides}), seed=3)
    return llama.Llama(llama.LlamaConfig(**{**LLAMA_SIZES, **overrides}), seed=3)


def split(model: nn.Module, mesh: DeviceMesh, **options: bool) -> nn.Module:
    module = gpt if isinstance(model, gpt.GPT) else llama
    return module.parallelize(model, mesh, **options)


def tp_mesh(size: int) -> DeviceMesh:
    return init_device_mesh("cpu", (size,), mesh_dim_names=("tensor_parallel",))


def batch(sequence_length: int = 16) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(VOCAB, (3, sequence_length + 1), generator=torch.Generator().manual_seed(1))
    tokens[0, :4] = VOCAB - 1  # the last row of the vocabulary, which the last rank holds
    return tokens[:, :-1], tokens[:, 1:]


def perturb(model: nn.Module) -> nn.Module:
    """Move biases and norm weights off their initial 0 and 1, where a wrong one would go unnoticed."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 1:
                weight.add_(torch.randn(weight.shape, generator=generator).to(weight.dtype), alpha=0.3)
            else:
                weight.mul_(5.0)  # scores and logits far enough from uniform that attention matters
    return model


def loss_of(model: nn.Module, sequence_length: int = 16) -> Tensor:
    inputs, targets = batch(sequence_length)
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def loss_and_gradients(model: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    loss = loss_of(model)
    loss.backward()
    return loss.detach(), {name: whole(weight.grad) for name, weight in model.named_parameters()}


def assert_same(actual: tuple[Tensor, dict[str, Tensor]], expected: tuple[Tensor, dict[str, Tensor]]) -> None:
    """Relative to each gradient's norm, 1e-10 for float64 and 1e-5 for float32."""
    tolerance = 1e-10 if expected[0].dtype == torch.float64 else 1e-5
    assert actual[0].item() == pytest.approx(expected[0].item(), rel=tolerance)
    assert actual[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        assert gradient.norm() > 0 or name.endswith("key.bias"), f"{name} has no gradient to compare"
        error = (actual[1][name] - gradient).norm()
        # A bias of the keys moves all scores of a query alike: its gradient is 0 but for rounding.
        scale = 1.0 if name.endswith("key.bias") else gradient.norm()
        assert error <= tolerance * scale, f"{name}: {error / scale:.1e}"


class CountedExchanges(TorchDispatchMode):
    """Counts collectives by kind, on this thread (torch's CommDebugMode mixes up ranks that are threads)."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor comes first, and then this mode sees what it does
        for kind in ("all_reduce", "reduce_scatter", "all_gather"):
            if function.namespace == "_c10d_functional" and kind in function.name():
                self.counts[kind] += 1
        return function(*args, **(kwargs or {}))


SPLITS = [  # kind, world size, sequence-parallel, tied, dtype: every pair of two settings is in it
    ("gpt", 2, False, False, torch.float64),
    ("gpt", 4, True, True, torch.float64),
    ("gpt", 4, True, False, torch.float32),
    ("llama", 2, True, False, torch.float32),
    ("llama", 2, False, True, torch.float64),
    ("llama", 4, False, True, torch.float32),
    ("llama", 4, True, True, torch.float64),
]


@pytest.mark.parametrize(("kind", "world_size", "sequence_parallel", "tied", "dtype"), SPLITS)
def test_split_model_has_the_loss_and_gradients_of_the_whole(
    kind: str, world_size: int, sequence_parallel: bool, tied: bool, dtype: torch.dtype
) -> None:
    expected = loss_and_gradients(perturb(build(kind, tie_embeddings=tied).to(dtype)))

    def rank(rank: int) -> tuple[Tensor, dict[str, Tensor]]:
        model = perturb(build(kind, tie_embeddings=tied).to(dtype))
        split(model, tp_mesh(world_size), sequence_parallel=sequence_parallel)
        assert all(isinstance(weight, DTensor) for weight in model.parameters())
        assert (model.head.weight is model.token_embedding.weight) == tied
        return loss_and_gradients(model)

    for actual in run_threads(world_size, rank):
        assert_same(actual, expected)


@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_loss_parallel_and_recomputed_activations_change_nothing(kind: str) -> None:
    expected = loss_and_gradients(perturb(build(kind).double()))

    def rank(rank: int) -> tuple[Tensor, dict[str, Tensor]]:
        model = perturb(build(kind, activation_checkpointing=True).double())
        split(model, tp_mesh(2), sequence_parallel=True, loss_parallel=True)
        inputs, targets = batch()
        with loss_parallel():  # patches a table of the whole process: forked ranks, not threads
            logits = model(inputs)
            assert isinstance(logits, DTensor)
            assert logits.placements == (Shard(2),)
            loss = next_token_loss(logits, targets)
            assert not isinstance(loss, DTensor)
            loss.backward()
        return loss.detach(), {name: whole(weight.grad) for name, weight in model.named_parameters()}

    for actual in run_forked(2, rank):
        assert_same(actual, expected)


@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_recomputed_activations_give_the_same_gradients_on_one_rank(kind: str) -> None:
    calls: list[str] = []
    plain, recomputed = build(kind), build(kind, activation_checkpointing=True)
    recomputed.blocks[0].mlp.register_forward_pre_hook(lambda *_: calls.append("forward"))
    expected, actual = loss_and_gradients(plain), loss_and_gradients(recomputed)
    assert calls == ["forward"] * 2
    assert all(torch.equal(actual[1][name], gradient) for name, gradient in expected[1].items())


@pytest.mark.parametrize(("kind", "sequence_parallel"), [("gpt", True), ("llama", False)])
def test_tensor_and_data_parallel_together(kind: str, sequence_parallel: bool) -> None:
    expected = loss_and_gradients(perturb(build(kind, tie_embeddings=True).double()))

    def rank(rank: int) -> tuple[Tensor, dict[str, Tensor]]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data_parallel", "tensor_parallel"))
        model = perturb(build(kind, tie_embeddings=True, activation_checkpointing=True).double())
        split(model, mesh["tensor_parallel"], sequence_parallel=sequence_parallel)
        shard_data_parallel(model, mesh["data_parallel"])
        return loss_and_gradients(model)  # the same batch on both data-parallel ranks: the mean is the gradient

    for actual in run_forked(4, rank):
        assert_same(actual, expected)


def test_adamw_takes_the_same_steps_at_any_tensor_parallel_size() -> None:
    """Under sequence parallelism, where gradients of norms are partial; without it `test_parity` has the losses."""

    def train(model: nn.Module) -> list[float]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for _ in range(4):
            loss = loss_of(model)
            loss.backward()
            optimizer.step()  # all weights are DTensors: its foreach form refuses a mixture
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    expected = train(build("gpt").double())
    assert expected[-1] < expected[0] - 0.1

    def rank(rank: int) -> list[float]:
        return train(split(build("gpt").double(), tp_mesh(2), sequence_parallel=True))

    for actual in run_threads(2, rank):
        assert actual == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize(("kind", "tied"), [("gpt", True), ("llama", False)])
def test_initial_weights_do_not_depend_on_the_split(kind: str, tied: bool) -> None:
    expected = {name: weight.detach() for name, weight in build(kind, tie_embeddings=tied).named_parameters()}
    spread = expected["blocks.0.attention.query.weight"].std().item()
    assert spread == pytest.approx(0.02, rel=0.1)
    assert expected["blocks.0.mlp.down.weight"].std().item() == pytest.approx(0.02 / 4**0.5, rel=0.1)
    assert not torch.equal(expected["blocks.0.attention.query.weight"], expected["blocks.1.attention.query.weight"])

    def rank(rank: int) -> dict[str, Tensor]:
        with torch.device("meta"):
            model = build(kind, tie_embeddings=tied)
        split(model, tp_mesh(4), sequence_parallel=True)
        materialize(model, torch.device("cpu"), seed=3)
        assert (model.head.weight is model.token_embedding.weight) == tied
        return {name: whole(weight.detach()) for name, weight in model.named_parameters()}

    for actual in run_threads(4, rank):
        assert actual.keys() == expected.keys()
        for name, weight in expected.items():
            assert torch.equal(actual[name], weight), name


@pytest.mark.parametrize(("kind", "sequence_parallel"), [("gpt", False), ("llama", False), ("llama", True)])
def test_projections_share_one_exchange(kind: str, sequence_parallel: bool) -> None:
    """Per layer two exchanges forward and two backward, whatever the number of projections (5 with one each)."""

    def rank(rank: int) -> tuple[dict[str, int], dict[str, int]]:
        model = split(build(kind, num_layers=3), tp_mesh(2), sequence_parallel=sequence_parallel)
        with CountedExchanges() as forward:
            loss = loss_of(model)
        with CountedExchanges() as backward:
            loss.backward()
        return dict(forward.counts), dict(backward.counts)

    layers = 3
    for forward, backward in run_threads(2, rank):
        if sequence_parallel:
            # Around the layers: the embedding's reduce-scatter, the head's gather of x and that of the logits.
            assert forward == {"reduce_scatter": 2 * layers + 1, "all_gather": 2 * layers + 2}
            assert backward == {"reduce_scatter": 2 * layers + 1, "all_gather": 2 * layers + 1}
        else:
            assert forward == {"all_reduce": 2 * layers + 1, "all_gather": 1}
            assert backward == {"all_reduce": 2 * layers + 1}


def test_sequence_parallel_norm_weights_have_partial_gradients() -> None:
    """What the strategy relies on when it reduces them, once and exactly, before a norm is taken."""

    def rank(rank: int) -> list[bool]:
        model = split(build("gpt"), tp_mesh(2), sequence_parallel=True)
        loss_of(model).backward()
        weights = (model.final_norm.weight, model.blocks[0].mlp_norm.bias, model.position_embedding.weight)
        return [isinstance(weight.grad.placements[0], Partial) for weight in weights]

    assert run_threads(2, rank) == [[True] * 3] * 2


@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_parallelize_twice_changes_nothing(kind: str) -> None:
    def rank(rank: int) -> None:
        mesh = tp_mesh(2)
        model = split(build(kind), mesh, sequence_parallel=True)
        weights, hooks = list(model.parameters()), [len(m._forward_pre_hooks) for m in model.modules()]
        assert split(model, mesh, sequence_parallel=True) is model
        assert all(now is before for now, before in zip(model.parameters(), weights, strict=True))
        assert [len(m._forward_pre_hooks) for m in model.modules()] == hooks

    run_threads(2, rank)


@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_the_layers_that_a_pipeline_may_cut_are_the_forward(kind: str) -> None:
    model = perturb(build(kind))
    inputs, _ = batch()
    output: Any = inputs
    for layer in read_layers(model):
        output = layer.function(output)
    assert torch.equal(output, model(inputs))
    owned = {id(parameter) for layer in read_layers(model) for parameter in layer.parameters()}
    assert owned == {id(parameter) for parameter in model.parameters()}


@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_one_tensor_parallel_rank_leaves_the_model_alone(kind: str) -> None:
    def rank(rank: int) -> None:
        model = split(build(kind), tp_mesh(1), sequence_parallel=True, loss_parallel=True)
        assert not any(isinstance(weight, DTensor) for weight in model.parameters())
        assert loss_of(model, sequence_length=5).isfinite()

    run_threads(1, rank)


INDIVISIBLE = [
    ("gpt", {"num_heads": 2}, r"num_heads of GPT \(blocks\.\*\.attention\) is 2, which tensor_parallel_size=4"),
    ("gpt", {"ffn_size": 30}, r"ffn_size of GPT \(blocks\.\*\.mlp\.up\) is 30, which tensor_parallel_size=4"),
    ("llama", {"num_kv_heads": 2}, r"num_kv_heads of Llama \(blocks\.\*\.attention\.key\) is 2, .*size=4"),
    ("llama", {"ffn_size": 26}, r"ffn_size of Llama \(blocks\.\*\.mlp\.up\) is 26, which tensor_parallel_size=4"),
]


@pytest.mark.parametrize(("kind", "sizes", "message"), INDIVISIBLE)
def test_sizes_that_do_not_divide_are_named(kind: str, sizes: dict[str, int], message: str) -> None:
    def rank(rank: int) -> None:
        model = build(kind, **sizes)
        with pytest.raises(ValueError, match=message):
            split(model, tp_mesh(4), sequence_parallel=False)
        assert not any(isinstance(weight, DTensor) for weight in model.parameters())  # not half done

    run_threads(4, rank)


@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_odd_sequence_is_refused_only_under_sequence_parallel(kind: str) -> None:
    expected = {length: loss_of(build(kind), length).item() for length in (1, 5, 7)}

    def rank(rank: int) -> None:
        mesh = tp_mesh(2)
        cut = split(build(kind), mesh, sequence_parallel=True)
        plain = split(build(kind), mesh, sequence_parallel=False)
        for length, loss in expected.items():
            message = rf"sequence length of {length}, which tensor_parallel_size=2 does not divide"
            with pytest.raises(ValueError, match=message):
                loss_of(cut, length)
            assert loss_of(plain, length).item() == pytest.approx(loss, rel=1e-5)

    run_threads(2, rank)


@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_sequence_longer_than_the_model_is_refused(kind: str) -> None:
    with pytest.raises(ValueError, match=r"sequence length of 17, but the model was built for at most 16"):
        loss_of(build(kind), 17)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (lambda: gpt.GPTConfig(hidden_size=30, num_heads=4), "hidden_size=30 is not a multiple of num_heads=4"),
        (lambda: gpt.GPTConfig.preset("3B"), "no GPT preset '3B': choose one of tiny, 350M, 2.7B, 6.7B, 13B"),
        (lambda: llama.LlamaConfig(num_heads=8, num_kv_heads=3), "num_heads=8 is not a multiple of num_kv_heads=3"),
        (lambda: llama.LlamaConfig(hidden_size=24, num_heads=8), "hidden_size=24 is not a multiple of 2"),
        (lambda: llama.LlamaConfig.preset("7B"), "no LLaMA preset '7B': choose one of tiny, 1B, 8B"),
    ],
)
def test_impossible_sizes_are_refused(config: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config()


@pytest.mark.parametrize(
    ("kind", "preset", "billions"),
    [
        ("gpt", "350M", 0.41),  # with a head of its own
        ("gpt", "2.7B", 2.78),
        ("gpt", "6.7B", 6.86),
        ("gpt", "13B", 13.11),
        ("llama", "1B", 1.236),
        ("llama", "8B", 8.03),
    ],
)
def test_presets_have_the_size_of_their_name(kind: str, preset: str, billions: float) -> None:
    with torch.device("meta"):
        if kind == "gpt":
            model: nn.Module = gpt.GPT(gpt.GPTConfig.preset(preset))
        else:
            model = llama.Llama(llama.LlamaConfig.preset(preset))
    assert sum(weight.numel() for weight in model.parameters()) / 1e9 == pytest.approx(billions, rel=0.01)


def test_rotary_scores_depend_on_the_distance_only() -> None:
    table = llama.rotary_table(9, 8, theta=100.0, device=torch.device("cpu")).double()
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(8, generator=generator).double().expand(1, 1, 9, 8) for _ in range(2))
    scores = llama.apply_rotary(query, table)[0, 0] @ llama.apply_rotary(key, table)[0, 0].T
    for distance in range(-8, 9):
        diagonal = scores.diagonal(distance)
        assert torch.allclose(diagonal, diagonal[:1].expand_as(diagonal), atol=1e-6)
    assert (scores[0, 1:] - scores[0, 0]).abs().min() > 1e-3


@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_later_tokens_do_not_reach_earlier_ones(kind: str) -> None:
    model = perturb(build(kind))
    tokens = batch()[0].clone()
    before = model(tokens)
    tokens[:, 9] = (tokens[:, 9] + 1) % VOCAB
    changed = (model(tokens) != before).any(dim=-1)
    assert not changed[:, :9].any()
    assert changed[:, 9].all()


def test_grouped_heads_equal_repeated_ones() -> None:
    """Two query heads share a key head: the same as a model whose key and value rows are written out twice."""
    shared, repeated = perturb(build("llama").double()), build("llama", num_kv_heads=8).double()
    state = shared.state_dict()
    for name in state:
        if name.endswith(("key.weight", "value.weight")):
            state[name] = state[name].unflatten(0, (4, 4)).repeat_interleave(2, dim=0).flatten(0, 1)
    repeated.load_state_dict(state)
    assert loss_of(repeated).item() == pytest.approx(loss_of(shared).item(), rel=1e-12)


@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_autocast_exchanges_bf16_between_layers(kind: str) -> None:
    """Without the cast behind each norm the gathers and the reductions of gradients would carry fp32."""

    def rank(rank: int) -> list[torch.dtype]:
        model = split(build(kind), tp_mesh(2), sequence_parallel=True)
        seen = []
        for name in ("attention", "mlp"):
            module = model.blocks[1].get_submodule(name)
            module.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].dtype))
        model.head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].dtype))
        with torch.autocast("cpu", torch.bfloat16):
            model(batch()[0])
        return seen

    assert run_threads(2, rank) == [[torch.bfloat16] * 3] * 2


@pytest.fixture
def text_data(tmp_path: Path) -> Callable[..., TextDataModule]:
    """Counting in words: a text that a tiny model learns to predict within a few steps."""
    words = ["one", "two", "three", "four", "five", "six", "seven"]
    (tmp_path / "count.txt").write_text(" ".join(words * 400))

    def make(**options: Any) -> TextDataModule:
        sizes = {"vocab_size": 270, "sequence_length": 16, "batch_size": 8, **options}
        return TextDataModule(files=str(tmp_path / "*.txt"), cache_dir=str(tmp_path / "cache"), **sizes)

    return make


def fit(
    data: TextDataModule, strategy: Any = "auto", devices: int = 1, **options: Any
) -> tuple[dict[str, float], list[Any]]:
    """Train for 8 steps, then validate, test and predict with the same module."""
    sizes = {"vocab_size": 270, "sequence_length": 16, "num_layers": 2, "hidden_size": 32, "num_heads": 4}
    module = LanguageModule(**{**sizes, "lr": 1e-2, "warmup_steps": 2, **options})
    trainer = Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        plugins=None if strategy == "auto" else [LightningEnvironment()],  # ranks that exist already
        max_steps=8,
        limit_val_batches=1,
        limit_test_batches=1,
        limit_predict_batches=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, data)
    metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
    built = module.model
    metrics.update(trainer.validate(module, data, verbose=False)[0])
    metrics.update(trainer.test(module, data, verbose=False)[0])
    predictions = trainer.predict(module, data)
    assert module.model is built  # validate, test and predict have not built and split it again
    assert not any(isinstance(value, DTensor) for value in trainer.callback_metrics.values())
    return metrics, predictions


@pytest.mark.parametrize(
    "options", [{}, {"model": "llama", "num_kv_heads": 2, "sequence_parallel": True, "loss_parallel": True}]
)
def test_module_trains_alike_on_one_rank_and_split(text_data: Callable[..., TextDataModule], options: dict) -> None:
    text_data().prepare_data()

    def train(size: int) -> list[tuple[dict[str, float], list[Any]]]:
        def rank(rank: int) -> tuple[dict[str, float], list[Any]]:
            strategy = ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=size)
            return fit(text_data(), strategy, devices=size, **options)

        return run_forked(size, rank)

    ((expected, whole_predictions),) = train(1)
    assert expected["train_loss"] < 4.5  # log(270) = 5.6 before
    assert whole_predictions[0].shape == (8, 16)
    assert whole_predictions[0].dtype == torch.int64
    for metrics, predictions in train(2):
        assert metrics == pytest.approx(expected, rel=1e-4)
        assert not isinstance(predictions[0], DTensor)
        assert (predictions[0] == whole_predictions[0]).float().mean() > 0.95  # but for ties


def test_module_trains_under_a_strategy_without_a_mesh(text_data: Callable[..., TextDataModule]) -> None:
    metrics, predictions = fit(text_data(), num_layers=1)
    assert metrics["train_loss"] < 4.5
    assert metrics["val_loss"] < 4.5
    assert predictions[0].shape == (8, 16)


@pytest.mark.parametrize("size", ["vocab_size", "sequence_length"])
def test_data_that_does_not_fit_the_model_is_refused(text_data: Callable[..., TextDataModule], size: str) -> None:
    limit = {"vocab_size": 260, "sequence_length": 8}[size]
    with pytest.raises(ValueError, match=rf"data module has {size}=\d+, but the model only {size}={limit}"):
        fit(text_data(), **{size: limit})


def test_key_value_heads_belong_to_llama() -> None:
    with pytest.raises(ValueError, match="num_kv_heads=2 was given, but model='gpt'"):
        LanguageModule(model="gpt", num_kv_heads=2)


def test_learning_rate_warms_up_and_decays_to_a_tenth() -> None:
    values = [lr_fraction(step, warmup_steps=4, num_steps=104) for step in range(105)]
    assert values[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert values[54] == pytest.approx(0.55)
    assert values[104] == pytest.approx(0.1)
    assert all(later < earlier for earlier, later in itertools.pairwise(values[4:]))
