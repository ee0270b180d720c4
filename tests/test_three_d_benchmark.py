"""The benchmark of all axes together runs on gloo ranks, and says what its variants compress."""

from typing import Any

import pytest

from examples.benchmarks import three_d as benchmark
from tests.lightning_models import warm_lightning  # noqa: F401  a fixture
from tests.ranks import run_forked

pytestmark = pytest.mark.usefixtures("warm_lightning")

TINY = (
    "--accelerator cpu --precision 32-true --preset tiny --num_layers 2 --sequence_length 32 --vocab_size 64 "
    "--batch_size 4 --num_microbatches 2 --warm_up_steps 1 --steps 1 --rounds 1 --min_bytes 0 --node_size 1"
)


def rows_at(data: int, pipeline: int, tensor: int, *more: str) -> dict[str, dict[str, Any]]:
    sizes = [f"--data_parallel_size={data}", f"--pipeline_parallel_size={pipeline}", f"--tensor_parallel_size={tensor}"]
    arguments = benchmark.parse([*TINY.split(), *sizes, *more])
    (rows, *others) = run_forked(data * pipeline * tensor, lambda _: benchmark.measure(arguments), 200)
    assert [row["step_ms"] for row in rows] == [row["step_ms"] for row in others[-1]]
    assert "| all |" in benchmark.table(rows)
    return {row["variant"]: row for row in rows}


@pytest.mark.slow
def test_eight_ranks_compress_every_axis() -> None:
    rows = rows_at(2, 2, 2)
    assert list(rows) == ["none", "all"]
    assert rows["none"]["speedup"] == 1.0
    assert rows["none"]["step_ms"] > 0
    assert 0 < abs(rows["all"]["loss_gap"]) < 0.01
    sent = rows["all"]["bytes"]
    assert set(sent) == {"tensor", "pipeline", "data"}
    assert sent["tensor"]["stock"] / sent["tensor"]["sent"] == pytest.approx(32 / 8.25, rel=0.01)
    assert sent["pipeline"]["stock"] / sent["pipeline"]["sent"] == pytest.approx(32 / 8.25, rel=0.01)
    assert 7 < sent["data"]["stock"] / sent["data"]["sent"] < 8  # 32 bits as 4.25 of gradients and 4.02 of weights


def test_an_axis_that_is_not_compressed_is_refused() -> None:
    with pytest.raises(AssertionError, match="all compressed nothing along tensor"):
        rows_at(1, 1, 2, "--variants", "all", "--min_bytes", str(1 << 30))
