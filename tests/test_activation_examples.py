"""The measuring scripts of stored activations at tiny sizes on a CPU: they run, and their arithmetic is right."""

import argparse
import gc
import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from examples import gpt
from examples.benchmarks import activation_loss, activations
from examples.benchmarks.activation_loss import gap
from examples.benchmarks.activations import TINY, WAYS, Training, longest
from examples.llama import Llama, LlamaConfig
from tests.ranks import run_forked


def run(script: Any, monkeypatch: pytest.MonkeyPatch, output: Path, *arguments: str) -> dict[str, Any]:
    monkeypatch.setattr(sys, "argv", ["script", *arguments, "--output", str(output)])
    script.main()
    return json.loads(output.read_text())


def test_bytes_and_times(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "figures.json"
    results = run(activations, monkeypatch, output, "--tiny", "--parts", "layer", "kernels")
    layers = {row["way"]: row for row in results["layer"]}
    assert set(layers) == set(WAYS)
    # On a CPU RMSNorm keeps more than a fused one, which is what is predicted.
    assert layers["fp4"]["stored_bytes"] == pytest.approx(layers["fp4"]["predicted_bytes"], rel=0.15)
    assert layers["fp4"]["stored_against_stock"] < -0.7 < layers["int8"]["stored_against_stock"]
    assert layers["recompute"]["stored_bytes"] < layers["fp4"]["stored_bytes"]
    assert all(row["us"] > 0 for row in results["kernels"])
    results = run(activations, monkeypatch, output, "--tiny", "--parts", "step", "longest", "--ways", "stock", "fp4")
    assert [row["tokens"] for row in results["longest"]] == [128, 128]  # a CPU takes all that is asked for
    assert [row["way"] for row in results["step"]] == ["stock", "fp4"]
    assert "\nlongest\n" in capsys.readouterr().out


@pytest.mark.parametrize("limit", [0, 64, 100, 1000, 5000, 100_000])
def test_the_longest_is_found_to_a_sixteenth(limit: int) -> None:
    tried: list[int] = []

    def fits(size: int) -> bool:
        tried.append(size)
        return size <= limit

    found = longest(fits, 65536, 64)
    best = min(limit, 65536) // 64 * 64
    assert best - max(64, best / 8) <= found <= best
    assert found % 64 == 0
    assert len(tried) < 20


@pytest.mark.parametrize("limit", [9_000, 20_480, 40_000, 65_536])
@pytest.mark.parametrize("guess_error", [0.98, 1.0, 1.03, 2.0, 0.3])
def test_a_guess_ends_the_search_early_where_it_is_right_and_harms_nothing_where_it_is_not(
    limit: int, guess_error: float
) -> None:
    tried: list[int] = []

    def fits(size: int) -> bool:
        tried.append(size)
        return size <= limit

    def expected() -> int | None:
        return int(limit * guess_error) if len(tried) >= 3 else None

    found = longest(fits, 1 << 20, 64, expected)
    best = limit // 64 * 64
    assert best * 15 / 16 - 64 <= found <= best
    assert len(tried) == len(set(tried))
    assert guess_error != 1.0 or max(tried) < 1.04 * limit
    assert len(tried) <= longest_tries(limit) + 2


def longest_tries(limit: int) -> int:
    tried: list[int] = []
    longest(lambda size: (tried.append(size), size <= limit)[1], 1 << 20, 64)  # type: ignore[func-returns-value]
    return len(tried)


def tiny_training(way: str, optimizer: str = "adamw") -> Training:
    arguments = argparse.Namespace(tiny=True, most_tokens=128, optimizer=optimizer)
    sizes = replace(LlamaConfig.preset("8B", vocab_size=128, num_layers=2), **TINY)
    return Training(way, sizes, arguments, torch.device("cpu"))


class Raises(torch.autograd.Function):
    """A device that is full when backward comes by."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("full")


def live_bytes() -> int:
    gc.collect()
    # No fake tensors, which graphs of torch.compile keep and which have no memory.
    tensors = [each for each in gc.get_objects() if type(each) in (torch.Tensor, torch.nn.Parameter)]
    tensors += [each.grad for each in tensors if each.is_leaf and each.grad is not None]
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
    return sum(storages.values())


@pytest.mark.parametrize(
    ("way", "place"),
    [("stock", "forward"), ("fp4", "forward"), ("fp4", "backward"), ("fp4", "loss"), ("recompute", "backward")],
)
def test_running_out_of_memory_leaves_nothing_behind(way: str, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    training = tiny_training(way)
    assert training.fits(64)
    mlp = training.model.blocks[0].mlp
    stock, loss = type(mlp).forward, activations.next_token_loss
    before = live_bytes()

    def forward(module: Any, x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] > 64 and module is mlp and place != "loss":
            if place == "forward":
                raise torch.OutOfMemoryError("full")
            x = Raises.apply(x)
        return stock(module, x)

    def next_token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if place == "loss" and targets.shape[1] > 64:
            raise torch.OutOfMemoryError("full")
        return loss(logits, targets)

    monkeypatch.setattr(type(mlp), "forward", forward)
    monkeypatch.setattr(activations, "next_token_loss", next_token_loss)
    assert [training.fits(128), training.fits(64), training.fits(128)] == [False, True, False]
    assert live_bytes() == before
    if training.handle is not None:
        assert training.handle.store._decoded is training.handle.store._held is None
    assert longest(training.fits, 128, 64) == 64


@pytest.mark.torchao
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_eight_bit_adam() -> None:
    training = tiny_training("fp4", "adamw8bit")
    with torch.compiler.set_stance("force_eager"):  # compilation takes a minute, and changes nothing that is ours
        assert training.fits(64)
    assert {type(optimizer_state["exp_avg"]).__name__ for optimizer_state in training.optimizer.state.values()} >= {
        "OptimState8bit"
    }


def test_an_eight_bit_adam_that_is_missing_is_said_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        run(activations, monkeypatch, tmp_path / "none.json", "--tiny", "--optimizer", "adamw8bit")
    assert "--optimizer adamw8bit needs torchao, which is not installed: install" in capsys.readouterr().err


def test_two_ranks_agree_on_what_fits() -> None:
    assert run_forked(2, agree_on_what_fits) == [64, 64]


def agree_on_what_fits(rank: int) -> int:
    """The second rank says last that it has run out: nothing may wait for it meanwhile."""
    training = tiny_training("fp4")
    assert training.ranks == 2
    step = training.step

    def limited(num_tokens: int) -> None:
        step(num_tokens)
        if rank == 1 and num_tokens > 64:
            raise torch.OutOfMemoryError("full")

    training.step = limited  # type: ignore[method-assign]
    return longest(training.fits, 128, 64, training.expected)


def test_a_layers_input_is_counted_with_what_keeps_it() -> None:
    """The allocator sees what is made in the forward only: an input made before would be free for stock autograd."""
    x = torch.randn(1, 8, 4, requires_grad=True)
    saved: list[int] = []
    hooks = torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: saved.append(tensor.untyped_storage().data_ptr()) or tensor, lambda tensor: tensor
    )
    with hooks:
        output = activations.forward_of_own_input(lambda x, rotary: x.square(), x, x)  # type: ignore[arg-type]
    assert saved
    assert x.untyped_storage().data_ptr() not in saved
    assert output.requires_grad


def test_both_ways_to_a_weights_gradient(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    output = tmp_path / "figures.json"
    arguments = ("--tiny", "--parts", "weight_gradient", "--ways", "stock", "fp4", "int8")
    rows = run(activations, monkeypatch, output, *arguments)["weight_gradient"]
    assert {row["way"] for row in rows} == {"fp4"}  # which a product can read
    assert [row["linear"] for row in rows[:5]] == ["query", "key, value", "output", "gate, up", "down"]
    for row in rows:
        assert row["separate_us"] == pytest.approx(row["product_us"] + row["decode_us"] / row["readers"])
        if activations.INTERPRETED:
            assert row["fused_us 0"] > 0
            assert row["relative_error"] < activations.LARGEST_ERROR


def test_wrong_gradients_of_a_weight_are_not_timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def wrong(gradient: torch.Tensor, source: Any, num_channels: int) -> dict[str, Any]:
        return {"wrong": lambda i: 1.1 * (gradient.t() @ source.value())}

    monkeypatch.setattr(activations, "fused_calls", wrong)
    monkeypatch.setattr(activations, "INTERPRETED", True)
    with pytest.raises(RuntimeError, match=r"gradient of query, fp4, .*: relative errors"):
        run(activations, monkeypatch, tmp_path / "none.json", "--tiny", "--parts", "weight_gradient")


def test_losses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"the number {number} follows {number - 1}, and so on. " for number in range(2_000)))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    sizes = ("--steps", "3", "--num-layers", "1", "--hidden-size", "32", "--sequence-length", "16", "--batch-size", "2")
    branches = ("--branches", "stock", "fp4", "everywhere", "--files", str(text))
    results = run(activation_loss, monkeypatch, tmp_path / "losses.json", *sizes, *branches)
    losses = {name: results[name]["losses"] for name in ("stock", "fp4", "everywhere")}
    assert {len(row) for row in losses.values()} == {3}
    assert losses["stock"][0] == losses["fp4"][0] == losses["everywhere"][0]  # the forward is the same
    assert len({row[-1] for row in losses.values()}) == 3
    assert results["fp4"]["ratio"] > 5


def test_losses_of_a_preset_in_bf16(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The GPT's layers at a tiny width: branches begin alike, and do not depend on those that ran before."""
    text = tmp_path / "text.txt"
    text.write_text("".join(f"the number {number} follows {number - 1}, and so on. " for number in range(2_000)))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    sizes = [
        "--steps",
        "4",
        "--num-layers",
        "1",
        "--hidden-size",
        "64",
        "--sequence-length",
        "16",
        "--batch-size",
        "2",
        "--vocab-size",
        "300",
    ]
    arguments = ("--preset", "350M", "--precision", "bf16", "--files", str(text), *sizes)
    branches = ("--branches", "stock", "stock#2", "fp4", "everywhere")
    results = run(activation_loss, monkeypatch, tmp_path / "losses.json", *arguments, *branches)
    first = {name: results[name]["losses"][0] for name in branches[1:]}
    assert first["stock"] == first["fp4"] == first["everywhere"]
    assert first["stock#2"] == pytest.approx(first["stock"], rel=1e-3)
    assert {len(results[name]["losses"]) for name in branches[1:]} == {4}
    again = run(activation_loss, monkeypatch, tmp_path / "again.json", *arguments, "--branches", "fp4", "stock")
    assert again["stock"]["losses"] == results["stock"]["losses"]  # whatever ran before it
    assert again["fp4"]["losses"] == results["fp4"]["losses"]


def test_a_preset_is_replaced_by_what_is_given() -> None:
    given = argparse.Namespace(preset="350M", num_layers=2, lr=None, precision=None, device=torch.device("cuda"))
    found = activation_loss.with_preset(given)
    assert (found.num_layers, found.hidden_size, found.lr, found.precision) == (2, 1024, 3e-4, "bf16")
    found = activation_loss.with_preset(argparse.Namespace(preset="tiny", precision=None, device=torch.device("cpu")))
    assert (found.num_layers, found.hidden_size, found.lr, found.precision) == (4, 128, 2e-3, "fp32")
    model = activation_loss.make_model(found)
    assert isinstance(model, Llama)
    assert model.blocks[0].mlp.up.weight.shape == (384, 128)


def test_the_preset_has_the_sizes_of_the_gpt() -> None:
    arguments = activation_loss.with_preset(
        argparse.Namespace(preset="350M", precision=None, device=torch.device("meta"))
    )
    preset = gpt.GPTConfig.preset("350M")
    assert (arguments.num_layers, arguments.hidden_size, arguments.num_heads) == (
        preset.num_layers,
        preset.hidden_size,
        preset.num_heads,
    )


def test_a_device_that_is_missing_is_said_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        run(activation_loss, monkeypatch, tmp_path / "none.json", "--device", "cuda")
    assert "--device cuda was given, but torch finds no CUDA device" in capsys.readouterr().err


def test_everywhere_stores_what_attention_keeps_and_no_statistics() -> None:
    everywhere = activation_loss.Everywhere(min_numel=2 * 16 * 64 // 4)
    query = torch.randn(2, 4, 16, 16, requires_grad=True)
    sizes: list[int] = []
    pack = everywhere.pack
    hooks = torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: (packed := pack(tensor), sizes.append(tensor.numel()) if isinstance(packed, tuple) else None)[0],
        everywhere.unpack,
    )
    with hooks:
        output = torch.nn.functional.scaled_dot_product_attention(query * 1, query * 2, query * 3)
    assert set(sizes) == {query.numel()}  # not the log-sum of each token and head
    assert len(sizes) >= 3
    output.sum().backward()
    assert query.grad is not None
    assert query.grad.isfinite().all()


def test_the_gap_is_paired() -> None:
    stock = [1.0, 2.0] * 50
    mean, error = gap([loss * 1.01 for loss in stock], stock)
    assert mean == pytest.approx(0.01)
    assert error < 1e-9
