"""The measuring scripts of stored activations at tiny sizes on a CPU: they run, and their arithmetic is right."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from examples.benchmarks import activation_loss, activations
from examples.benchmarks.activation_loss import gap
from examples.benchmarks.activations import WAYS, longest


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


def test_the_gap_is_paired() -> None:
    stock = [1.0, 2.0] * 50
    mean, error = gap([loss * 1.01 for loss in stock], stock)
    assert mean == pytest.approx(0.01)
    assert error < 1e-9
