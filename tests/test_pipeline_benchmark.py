"""The benchmark of pipelines runs on two gloo ranks, and its figures are what they are called."""

import pytest

from examples.benchmarks import pipeline as benchmark
from lightning_taco.pipeline_parallel import make_layout
from tests.ranks import run_forked

TINY = "--preset tiny --num_layers 2 --batch_size 4 --num_microbatches 4 --sequence_length 32 --vocab_size 64 --steps 1"


def test_variants_send_what_their_codec_says_and_agree_with_torch() -> None:
    arguments = benchmark.parse([*TINY.split(), "--rounds", "1", "--device", "cpu", "--dtype", "float32"])

    def check(rank: int) -> list[dict[str, object]]:
        return benchmark.PipelineBenchmark(arguments, benchmark.open_ranks("cpu")).measure()

    for rows in run_forked(2, check):
        by_name = {row["variant"]: row for row in rows}
        assert list(by_name) == ["torch", "none", "int8", "int4"]
        assert by_name["none"]["loss_gap"] == pytest.approx(0, abs=1e-6)
        assert by_name["none"]["sent_bytes"] == 2 * 4 * 32 * 256 * 4  # both ways, 4 micro-batches of one sample
        assert by_name["int8"]["ratio"] == pytest.approx(32 / 8.25, rel=1e-3)
        assert by_name["int4"]["ratio"] == pytest.approx(32 / 4.25, rel=1e-3)
        assert all(0 <= by_name[name]["bubble"] < 1 for name in ("none", "int8", "int4"))
        assert "bubble (theory 20.0%)" in benchmark.table(rows, benchmark.theoretical_bubble(make_layout("1F1B", 2), 4))
