"""The algorithms that a compressed exchange can go by. `break_even` chooses among them by measurement."""

from __future__ import annotations

from typing import Literal

import torch.distributed as dist

from lightning_taco.collectives.compressed import Group
from lightning_taco.collectives.traffic import Kind
from lightning_taco.collectives.transport import ProcessGroupTransport

Algorithm = Literal["one_shot", "two_shot", "all_to_all", "all_gather"]
KINDS: tuple[Kind, ...] = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")


def algorithms_of(kind: Kind, num_ranks: int) -> tuple[Algorithm, ...]:
    """The algorithms that can be chosen for an exchange, the default first.

    Two ranks send the same bytes by a one-shot and a two-shot all-reduce, and the latter quantises twice; an all-to-all
    of two ranks can be an all-gather of what each has for the other.

    >>> algorithms_of("all_reduce", 4), algorithms_of("reduce_scatter", 2)
    (('two_shot', 'one_shot'), ('all_to_all', 'all_gather'))
    """
    if kind == "all_gather":
        return ("all_gather",)
    if kind == "all_reduce":
        return ("one_shot",) if num_ranks == 2 else ("two_shot", "one_shot")
    return ("all_to_all", "all_gather") if num_ranks == 2 else ("all_to_all",)


def carrier(group: dist.ProcessGroup, algorithm: Algorithm | None) -> Group:
    """What carries the messages of a reduce-scatter or an all-to-all that goes by `algorithm`; ``None``: by default."""
    return ProcessGroupTransport(group, pairs_gather=True) if algorithm == "all_gather" else group
