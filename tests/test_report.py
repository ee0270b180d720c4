"""What the user reads at the start and at the end of a run, word for word."""

import io
import math
from dataclasses import dataclass
from typing import Any, cast

import pytest
from rich.console import Console
from torch.distributed.device_mesh import DeviceMesh

from lightning_taco.collectives.traffic import TrafficCounters, TrafficKey
from lightning_taco.config import CodecConfig, CompressionConfig, resolve_compression
from lightning_taco.dtensor.errors import ErrorKey, SiteError
from lightning_taco.strategies.report import end_table, format_bytes, print_end_table, start_lines, worst_site_text

DOWN = ErrorKey("blocks.1.mlp.down", "forward", "all_reduce")
UP = ErrorKey("blocks.0.mlp.up", "backward", "reduce_scatter")
OUTSIDE = ErrorKey("", "forward", "all_gather")


@dataclass
class Mesh:
    """As much of a DeviceMesh as the lines at the start read."""

    sizes: dict[str, int]

    @property
    def mesh_dim_names(self) -> tuple[str, ...]:
        return tuple(self.sizes)

    def size(self, axis: int) -> int:
        return list(self.sizes.values())[axis]


def lines(config: CompressionConfig | None, element: str = "e4m3", **sizes: int) -> list[str]:
    mesh = Mesh(sizes or {"data_parallel": 1, "tensor_parallel": 2})
    return [line.removeprefix("lightning_taco: ") for line in start_lines(config, element, cast(DeviceMesh, mesh))]


def counters(*rows: tuple[str, str, str, str, int, int]) -> TrafficCounters:
    """Counters of one message for each row: site, direction, kind, outcome, stock bytes, sent bytes."""
    traffic = TrafficCounters()
    for site, direction, kind, outcome, stock_bytes, sent_bytes in rows:
        traffic.record(TrafficKey(site, cast(Any, direction), cast(Any, kind), outcome), stock_bytes, sent_bytes)
    return traffic


def printed(traffic: TrafficCounters, errors: dict[ErrorKey, SiteError]) -> list[str]:
    stream = io.StringIO()
    print_end_table(traffic, errors, Console(file=stream, width=120))
    return [line.rstrip() for line in stream.getvalue().splitlines()]


def cells(traffic: TrafficCounters) -> list[tuple[str, ...]]:
    """The rows of the table, without its frame."""
    table = end_table(traffic, {})
    return list(zip(*(list(column.cells) for column in table.columns), strict=True))


# At the start


def test_the_default_says_what_is_compressed() -> None:
    assert lines(CompressionConfig(), data_parallel=3, tensor_parallel=4) == [
        "mesh data_parallel=3, tensor_parallel=4",
        "forward: int8, block 128, Hadamard, 8.25 bits a value",
        "backward: int8, block 128, Hadamard, 8.25 bits a value",
        "compressed are exchanges of intermediate tensors over the tensor_parallel axis of at least 1.0 MiB, "
        "in training",
    ]


def test_every_line_names_the_package() -> None:
    mesh = cast(DeviceMesh, Mesh({"tensor_parallel": 2}))
    config = CompressionConfig(exclude=("head",), recipes={"*.mlp": "int8"})
    assert all(line.startswith("lightning_taco: ") for line in start_lines(config, "e4m3", mesh))


def test_automatic_element_is_what_the_ranks_agreed_on() -> None:
    automatic = CodecConfig(element="auto")
    for element in ("int8", "e4m3"):
        assert lines(CompressionConfig(forward=automatic, backward=automatic), element)[1:3] == [
            f"forward: {element}, block 128, Hadamard (chosen for this device), 8.25 bits a value",
            f"backward: {element}, block 128, Hadamard (chosen for this device), 8.25 bits a value",
        ]


def test_a_chosen_element_is_not_called_chosen_for_the_device() -> None:
    config = CompressionConfig(
        forward=CodecConfig(element="int8", block_size=64, rotation=False), backward=None, min_bytes=0
    )
    assert lines(config)[1:] == [
        "forward: int8, block 64, no rotation, 8.5 bits a value",
        "backward: as it is",
        "compressed are exchanges of intermediate tensors over the tensor_parallel axis of at least 0 B, in training",
    ]


def test_dual_scale_costs_two_scales_a_block() -> None:
    taco = resolve_compression("taco")
    assert lines(taco)[1] == "forward: e4m3, block 128, Hadamard, dual scale, 8.5 bits a value"


def test_evaluation_excludes_and_recipes_are_named_in_order() -> None:
    config = CompressionConfig(
        min_bytes=1536,
        during_validation=True,
        exclude=("head", "blocks.0.*"),
        recipes={"*.mlp": "int8", "embedding": "none"},
    )
    assert lines(config)[3:] == [
        "compressed are exchanges of intermediate tensors over the tensor_parallel axis of at least 1.5 KiB, "
        "in training and evaluation",
        "sent as they are: modules matching head, blocks.0.*",
        "modules matching *.mlp use the recipe 'int8'",
        "modules matching embedding use the recipe 'none'",
    ]


def test_off_is_said() -> None:
    assert lines(None) == [
        "mesh data_parallel=1, tensor_parallel=2",
        "compression is off; tensors travel as they are",
    ]


# At the end


def test_table_adds_up_by_kind_and_direction() -> None:
    traffic = counters(
        ("blocks.0", "forward", "all_reduce", "compressed", 1024, 256),
        ("blocks.1", "forward", "all_reduce", "compressed", 1024, 512),
        ("blocks.1", "backward", "all_reduce", "compressed", 4096, 1024),
        ("head", "forward", "all_gather", "compressed", 300, 100),
        ("head", "forward", "all_gather", "smaller than min_bytes=64", 100, 100),
        ("head", "forward", "all_reduce", "reduction max", 8, 8),
    )
    assert cells(traffic) == [
        ("all_reduce, forward", "2", "2.0 KiB", "768 B", "2.67x"),
        ("all_gather, forward", "1", "300 B", "100 B", "3.00x"),
        ("all_reduce, backward", "1", "4.0 KiB", "1.0 KiB", "4.00x"),
        ("not compressed", "2", "108 B", "108 B", "1.00x"),
        ("all", "6", "6.4 KiB", "2.0 KiB", "3.28x"),
    ]


def test_a_run_that_compressed_everything_has_no_row_of_the_rest() -> None:
    traffic = counters(("up", "backward", "all_to_all", "compressed", 64, 32))
    assert cells(traffic) == [
        ("all_to_all, backward", "1", "64 B", "32 B", "2.00x"),
        ("all", "1", "64 B", "32 B", "2.00x"),
    ]


def test_no_traffic_gives_a_ratio_of_one_and_not_a_division_by_zero() -> None:
    assert cells(TrafficCounters()) == [("all", "0", "0 B", "0 B", "1.00x")]


def test_messages_without_bytes_are_counted() -> None:
    """A rank whose shard is empty sends messages of no bytes."""
    traffic = counters(("up", "forward", "all_gather", "compressed", 0, 0))
    assert cells(traffic)[0] == ("all_gather, forward", "1", "0 B", "0 B", "1.00x")


def test_printed_table_ends_with_the_worst_site_and_the_reasons() -> None:
    traffic = counters(
        ("blocks.1.mlp.down", "forward", "all_reduce", "compressed", 4096, 1056),
        ("head", "forward", "all_gather", "excluded in forward", 512, 512),
        ("", "backward", "all_reduce", "dtype int64", 16, 16),
        ("", "backward", "all_reduce", "dtype int64", 16, 16),
    )
    assert printed(traffic, {DOWN: SiteError(0.025, 0, 512)}) == [
        "     lightning_taco: what one rank sent over the tensor-parallel axis",
        "┏━━━━━━━━━━━━━━━━━━━━━┳━━━━━━━━━━┳━━━━━━━━━━━━━━━━━━━━━━┳━━━━━━━━━┳━━━━━━━┓",
        "┃ exchange            ┃ messages ┃ would have been sent ┃    sent ┃ ratio ┃",
        "┡━━━━━━━━━━━━━━━━━━━━━╇━━━━━━━━━━╇━━━━━━━━━━━━━━━━━━━━━━╇━━━━━━━━━╇━━━━━━━┩",
        "│ all_reduce, forward │        1 │              4.0 KiB │ 1.0 KiB │ 3.88x │",
        "│ not compressed      │        3 │                544 B │   544 B │ 1.00x │",
        "├─────────────────────┼──────────┼──────────────────────┼─────────┼───────┤",
        "│ all                 │        4 │              4.5 KiB │ 1.6 KiB │ 2.90x │",
        "└─────────────────────┴──────────┴──────────────────────┴─────────┴───────┘",
        "worst site: blocks.1.mlp.down, forward all_reduce: relative L2 error 2.50%",
        "                                (-32.0 dB)",
        "  not compressed, 2 messages: dtype int64",
        "  not compressed, 1 messages: excluded in forward",
    ]


def test_a_run_without_samples_names_no_site() -> None:
    assert worst_site_text({}) is None
    text = "\n".join(printed(counters(("up", "forward", "all_reduce", "compressed", 64, 32)), {}))
    assert "worst site" not in text


def test_the_worst_site_is_the_one_with_the_largest_error() -> None:
    errors = {DOWN: SiteError(0.01, 0, 8), UP: SiteError(0.1, 0, 8), OUTSIDE: SiteError(0.02, 0, 8)}
    assert worst_site_text(errors) == (
        "worst site: blocks.0.mlp.up, backward reduce_scatter: relative L2 error 10.00% (-20.0 dB)"
    )


def test_a_site_outside_any_module_is_called_so() -> None:
    assert worst_site_text({OUTSIDE: SiteError(0.01, 0, 8)}) == (
        "worst site: (outside any module), forward all_gather: relative L2 error 1.00% (-40.0 dB)"
    )


def test_no_error_at_all_is_minus_infinity_in_decibels() -> None:
    assert worst_site_text({DOWN: SiteError(0.0, 0, 8)}) == (
        "worst site: blocks.1.mlp.down, forward all_reduce: relative L2 error 0.00% (-inf dB)"
    )


@pytest.mark.parametrize("order", [(DOWN, UP), (UP, DOWN)])
def test_non_finite_values_are_worse_than_any_error(order: tuple[ErrorKey, ErrorKey]) -> None:
    errors = {DOWN: SiteError(math.inf, 3, 8), UP: SiteError(0.9, 0, 8)}
    text = worst_site_text({key: errors[key] for key in order})
    assert text is not None
    assert text.startswith("worst site: blocks.1.mlp.down, forward all_reduce")
    assert text.endswith(": 3 of 8 values were NaN or Inf")


# Bytes


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (1024**2, "1.0 MiB"),
        (1024**3 * 2.25, "2.2 GiB"),
        (1024**4, "1.0 TiB"),
        (1024**5 * 3, "3072.0 TiB"),
    ],
)
def test_bytes_have_binary_units(num_bytes: float, text: str) -> None:
    assert format_bytes(num_bytes) == text
