"""Two runs' ``metrics.csv`` side by side, as a Markdown table: losses by step, their gap, and step times.

Example::

    python examples/benchmarks/compare_runs.py logs/gpt_350m_h200_uncompressed/version_0 logs/gpt_350m_h200/version_0
"""

import argparse
import csv
import statistics
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("baseline", type=Path, help="log folder of the uncompressed run")
    parser.add_argument("compressed", type=Path, help="log folder of the compressed run")
    parser.add_argument("--last", type=int, default=10, help="logged values in the mean gap")
    arguments = parser.parse_args()
    baseline, compressed = read_metrics(arguments.baseline), read_metrics(arguments.compressed)
    print("\n".join(markdown(baseline, compressed, arguments.last)))


def read_metrics(folder: Path) -> dict[str, dict[int, float]]:
    """Metric name to step to value."""
    metrics: dict[str, dict[int, float]] = {}
    with (folder / "metrics.csv").open() as file:
        for row in csv.DictReader(file):
            for name, text in row.items():
                if name not in ("step", "epoch") and text:
                    metrics.setdefault(name, {})[int(row["step"])] = float(text)
    return metrics


def markdown(baseline: dict[str, dict[int, float]], compressed: dict[str, dict[int, float]], last: int) -> list[str]:
    """The table and the figures below it."""
    lines = ["| step | loss, uncompressed | loss, compressed | gap |", "|---|---|---|---|"]
    for name in ("train_loss", "val_loss"):
        pairs = _pairs(baseline, compressed, name)
        lines += [
            f"| {step}{' (validation)' if name == 'val_loss' else ''} | {a:.4f} | {b:.4f} | {(b - a) / a:+.3%} |"
            for step, a, b in pairs
        ]
        if name == "train_loss" and pairs:
            gap = statistics.mean((b - a) / a for _, a, b in pairs[-last:])
            footer = f"Mean gap of the training loss over the last {min(last, len(pairs))} logged steps: {gap:+.3%}."
    lines += ["", footer]
    times = [statistics.median(list(run["step_ms"].values())[1:]) for run in (baseline, compressed) if "step_ms" in run]
    if len(times) == 2:
        lines.append(
            f"Median step: {times[0]:.1f} ms uncompressed, {times[1]:.1f} ms compressed ({times[0] / times[1]:.2f}x)."
        )
    return lines


def _pairs(
    baseline: dict[str, dict[int, float]], compressed: dict[str, dict[int, float]], name: str
) -> list[tuple[int, float, float]]:
    steps = sorted(baseline.get(name, {}).keys() & compressed.get(name, {}).keys())
    return [(step, baseline[name][step], compressed[name][step]) for step in steps]


if __name__ == "__main__":
    main()
