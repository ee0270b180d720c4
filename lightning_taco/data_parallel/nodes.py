"""Which data-parallel ranks share a node, and the process groups inside a node and between nodes."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch.distributed as dist

LOCAL_WORLD_SIZE = "LOCAL_WORLD_SIZE"


@dataclass(frozen=True)
class NodeGroups:
    """The ranks of `whole`, rank r = node * node_size + place, and the two groups of which this rank is a member.

    Attributes:
        whole: all data-parallel ranks.
        inside: those of this rank's node; ``None`` unless there are two levels.
        between: those at this rank's place of each node; ``None`` unless there are two levels.
        node_size: ranks of one node; 1 if each is alone on its node.
    """

    whole: dist.ProcessGroup
    inside: dist.ProcessGroup | None
    between: dist.ProcessGroup | None
    node_size: int

    @property
    def world_size(self) -> int:
        """All data-parallel ranks."""
        return self.whole.size()

    @property
    def num_nodes(self) -> int:
        """Nodes over which they are spread."""
        return self.world_size // self.node_size

    @property
    def has_two_levels(self) -> bool:
        """Whether a node holds several ranks, and there are several nodes."""
        return self.inside is not None


def make_node_groups(group: dist.ProcessGroup, node_size: int | None = None, *, split: bool = True) -> NodeGroups:
    """Find the nodes of `group`, and make its two levels of groups where there are two.

    Every rank of the default group calls it at the same time, also those of other data-parallel groups.

    Args:
        group: the data-parallel ranks.
        node_size: consecutive ranks of `group` on one node; left out, the environment's ``LOCAL_WORLD_SIZE`` says it,
            and without that all ranks are on one node.
        split: whether to make groups for two levels.

    Raises:
        ValueError: for a `node_size` that does not divide the group, on every rank alike.

    Cost: one gather of small objects over all ranks, and the start of two groups.
    """
    size = given_node_size(group.size(), node_size) if node_size is not None else node_size_from_environment(group)
    ranks = dist.get_process_group_ranks(group)
    has_two_levels = split and 1 < size < len(ranks)
    everybodys: list[tuple[tuple[int, ...], int]] = [((), 0)] * dist.get_world_size()
    dist.all_gather_object(everybodys, (tuple(ranks), size if has_two_levels else 0))
    inside = between = None
    own = dist.get_rank()
    # Every rank takes part in making every group, in the same order.
    for members, members_size in sorted(set(everybodys)):
        for names in _subgroups(members, members_size):
            made = dist.new_group(names)
            if own in names and tuple(ranks) == members:
                is_node = names == _node_of(own, members, members_size)
                inside, between = (made, between) if is_node else (inside, made)
    return NodeGroups(whole=group, inside=inside, between=between, node_size=size)


def given_node_size(world_size: int, node_size: int) -> int:
    """`node_size`, if nodes of that size make up `world_size` ranks; at most `world_size`.

    Raises:
        ValueError: with both numbers and sizes that work.
    """
    if node_size >= world_size:
        return world_size
    if world_size % node_size:
        divisors = ", ".join(str(size) for size in range(1, world_size + 1) if world_size % size == 0)
        raise ValueError(
            f"node_size={node_size} does not divide the {world_size} data-parallel ranks, so their nodes would hold "
            f"different numbers of them; use one of {divisors} (1 or {world_size} for one level only)."
        )
    return node_size


def node_size_from_environment(group: dist.ProcessGroup) -> int:
    """Ranks of `group` on one node by ``LOCAL_WORLD_SIZE``; 1, which is one level, where nodes hold different numbers.

    Cost: one gather of small objects over `group`, so that ranks whose environments differ agree.
    """
    ranks = dist.get_process_group_ranks(group)
    per_node: list[int] = [0] * len(ranks)
    dist.all_gather_object(per_node, int(os.environ.get(LOCAL_WORLD_SIZE, 0)), group=group)
    if per_node[0] < 1 and len(set(per_node)) == 1:
        return len(ranks)
    return 1 if len(set(per_node)) > 1 else regular_node_size(ranks, per_node[0])


def regular_node_size(ranks: list[int], processes_per_node: int) -> int:
    """How many of `ranks` share a node, if it is the same number of consecutive ones on each; else 1, one level.

    >>> regular_node_size([0, 2, 4, 6], 4), regular_node_size([0, 4], 4), regular_node_size([0, 1, 2], 2)
    (2, 1, 1)
    """
    nodes = [rank // processes_per_node for rank in ranks]
    size = nodes.count(nodes[0])
    is_regular = len(ranks) % size == 0 and nodes == sorted(nodes)
    return size if is_regular and all(nodes.count(node) == size for node in nodes) else 1


def _subgroups(members: tuple[int, ...], node_size: int) -> list[list[int]]:
    if not node_size:
        return []
    nodes = [list(members[start : start + node_size]) for start in range(0, len(members), node_size)]
    return nodes + [list(members[place::node_size]) for place in range(node_size)]


def _node_of(rank: int, members: tuple[int, ...], node_size: int) -> list[int]:
    start = members.index(rank) // node_size * node_size
    return list(members[start : start + node_size])
