"""The data-parallel benchmark at sizes of a test: what it reports is what it says."""

from typing import Any

import torch

from examples.benchmarks import data_parallel as benchmark
from examples.llama import LlamaConfig
from tests.ranks import run_forked

CPU = torch.device("cpu")


def four_ranks(rank: int) -> dict[str, Any]:
    return {
        "reduce_scatter": benchmark.reduce_scatter_rows(1 << 16, 2, CPU),
        "accumulate": benchmark.accumulate_rows(1 << 16, 2, CPU),
    }


def test_every_table_on_four_ranks(capsys: Any) -> None:
    for found in run_forked(4, four_ranks):
        rows = {row["gradients"]: row for row in found["reduce_scatter"]}
        assert list(rows) == ["fp32", "bf16", "8 bits", "4 bits", "8 + 4 bits"]
        errors = [rows[name]["relative_error"] for name in rows]
        assert errors[0] < 1e-6
        assert errors[1] < 0.01
        assert errors[2] < 0.02
        assert all(0.1 < error < 0.25 for error in errors[3:])
        assert rows["fp32"]["against fp32"] == rows["bf16"]["against bf16"] == 1.0
        assert {row["kept in"] for row in found["accumulate"]} == {"copy", *benchmark.KEPT}
        assert all(row["us"] > 0 for row in found["accumulate"])
    benchmark.print_tables(found)
    assert "8 + 4 bits" in capsys.readouterr().out


def test_memory_of_gradients() -> None:
    config = LlamaConfig.preset("tiny", vocab_size=256, num_layers=1)
    exact, kept = benchmark.memory_rows(config, 2, CPU)
    assert exact["bits"] == 32.0
    assert 8.25 <= kept["bits"] < 8.3
    assert kept["saved"] > 0.74
