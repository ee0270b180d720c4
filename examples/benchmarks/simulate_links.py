"""A discrete simulation of exchanges over P ranks: transfers that share links fairly, and kernels between them.

What `link_model` says in closed form comes out of it where ranks are alike and meet, within rounding; see the tests. It
also says what the closed form does not know: hosts whose ranks share a NIC, a rank that comes late, unlike links.

Bandwidth is shared as TCP and switches do it in the long run: max-min fairly. Transfers of which nothing holds the rate
down take the same share of a link; a share that one cannot use goes to the others. Times are microseconds.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

Link = Hashable
ROUNDING = 1e-9


@dataclass(frozen=True)
class Network:
    """Which links a transfer uses, and what they carry.

    Attributes:
        bytes_per_us: capacity of each link.
        route: links between two ranks.
        latency_us: before the first byte of a transfer.
    """

    bytes_per_us: Mapping[Link, float]
    route: Callable[[int, int], tuple[Link, ...]]
    latency_us: float = 0.0


def switch(num_ranks: int, bytes_per_us: float, latency_us: float = 0.0, shared: float | None = None) -> Network:
    """Ranks with a port each way; with `shared`, all transfers also go through one medium of that capacity."""
    ports: dict[Link, float] = {(way, rank): bytes_per_us for way in ("out", "in") for rank in range(num_ranks)}
    medium: dict[Link, float] = {} if shared is None else {"medium": shared}
    return Network({**ports, **medium}, lambda a, b: (("out", a), ("in", b), *medium), latency_us)


def hosts(num_ranks: int, per_host: int, inside: float, nic: float, latency_us: float = 0.0) -> Network:
    """Hosts of `per_host` ranks with ports of `inside` bytes/us each way, and one NIC of `nic` for all of a host."""
    ports: dict[Link, float] = {(way, rank): inside for way in ("out", "in") for rank in range(num_ranks)}
    nics: dict[Link, float] = {
        (way, "nic", host): nic for way in ("out", "in") for host in range(-(-num_ranks // per_host))
    }

    def route(a: int, b: int) -> tuple[Link, ...]:
        one, other = a // per_host, b // per_host
        between: tuple[Link, ...] = () if one == other else (("out", "nic", one), ("in", "nic", other))
        return (("out", a), *between, ("in", b))

    return Network({**ports, **nics}, route, latency_us)


@dataclass(frozen=True)
class Task:
    """Work of `busy_us`, then, if there are bytes, a transfer; after the tasks `after`.

    Attributes:
        after: numbers of tasks that have to be done before.
        busy_us: kernels, or waiting.
        source: sending rank.
        target: receiving rank.
        num_bytes: that are transferred.
    """

    after: tuple[int, ...] = ()
    busy_us: float = 0.0
    source: int = 0
    target: int = 0
    num_bytes: float = 0.0


@dataclass
class Plan:
    """Tasks of an exchange. Each method takes and gives, for each rank, the number of the task that it has to await."""

    num_ranks: int
    tasks: list[Task] = field(default_factory=list)

    def start(self, late_us: Mapping[int, float] | None = None) -> list[int]:
        """Ranks arrive, some late."""
        return [self._add(Task(busy_us=(late_us or {}).get(rank, 0.0))) for rank in range(self.num_ranks)]

    def work(self, ready: list[int], busy_us: float) -> list[int]:
        """Each rank computes."""
        return [self._add(Task((task,), busy_us)) for task in ready]

    def ring(self, ready: list[int], num_steps: int, step_bytes: float) -> list[int]:
        """In each step each rank sends on to the next what it has received in the one before."""
        for _ in range(num_steps):
            sent = [
                self._add(Task((ready[rank],), 0.0, rank, (rank + 1) % self.num_ranks, step_bytes))
                for rank in range(self.num_ranks)
            ]
            ready = [self._add(Task((sent[rank - 1], sent[rank]))) for rank in range(self.num_ranks)]
        return ready

    def all_to_all(self, ready: list[int], pair_bytes: float) -> list[int]:
        """Each rank sends to each other at once; what it sends has to be gone, and what it receives to be there."""
        own: list[list[int]] = [[ready[rank]] for rank in range(self.num_ranks)]
        for rank in range(self.num_ranks):
            for peer in range(self.num_ranks):
                if peer != rank:
                    sent = self._add(Task((ready[rank],), 0.0, rank, peer, pair_bytes))
                    own[rank].append(sent)
                    own[peer].append(sent)
        return [self._add(Task(tuple(tasks))) for tasks in own]

    def _add(self, task: Task) -> int:
        self.tasks.append(task)
        return len(self.tasks) - 1


def ring_all_reduce_us(
    network: Network, num_ranks: int, num_bytes: float, late_us: Mapping[int, float] | None = None
) -> float:
    """Until the last rank has the sum: P - 1 steps that add up, P - 1 that spread, of a P-th of the bytes each."""
    plan = Plan(num_ranks)
    plan.ring(plan.start(late_us), 2 * (num_ranks - 1), num_bytes / num_ranks)
    return simulate(plan.tasks, network)


def two_shot_us(
    network: Network,
    num_ranks: int,
    message_bytes: float,
    kernels_us: tuple[float, float, float] = (0.0, 0.0, 0.0),
    late_us: Mapping[int, float] | None = None,
) -> float:
    """Until the last rank has decoded; `kernels_us` to encode, to add up and quantise, and to decode.

    The all-gather is a ring, as the library's.
    """
    encode_us, requantize_us, decode_us = kernels_us
    plan, part = Plan(num_ranks), message_bytes / num_ranks
    ready = plan.all_to_all(plan.work(plan.start(late_us), encode_us), part)
    ready = plan.ring(plan.work(ready, requantize_us), num_ranks - 1, part)
    plan.work(ready, decode_us)
    return simulate(plan.tasks, network)


def simulate(tasks: Sequence[Task], network: Network) -> float:
    """When the last task is done.

    Cost: (transfers)^2 x links, pure Python: 8 ranks take some hundredths of a second.
    """
    missing = [len(set(task.after)) for task in tasks]
    followers: dict[int, list[int]] = {}
    for number, task in enumerate(tasks):
        for before in set(task.after):
            followers.setdefault(before, []).append(number)
    now = 0.0
    busy_until = {number: _delay_us(tasks[number], network) for number, count in enumerate(missing) if count == 0}
    left: dict[int, float] = {}
    while busy_until or left:
        rates = fair_rates({number: _route(tasks[number], network) for number in left}, network.bytes_per_us)
        next_us = min([*busy_until.values(), *(now + left[number] / rates[number] for number in left)])
        left = {number: count - rates[number] * (next_us - now) for number, count in left.items()}
        now = next_us
        done = [number for number, count in left.items() if count <= ROUNDING * tasks[number].num_bytes]
        for number in [number for number, end in busy_until.items() if end <= now]:
            del busy_until[number]
            if tasks[number].num_bytes:
                left[number] = tasks[number].num_bytes
            else:
                done.append(number)
        for number in done:
            left.pop(number, None)
            for follower in followers.get(number, ()):
                missing[follower] -= 1
                if missing[follower] == 0:
                    busy_until[follower] = now + _delay_us(tasks[follower], network)
    return now


def fair_rates(routes: Mapping[int, Iterable[Link]], bytes_per_us: Mapping[Link, float]) -> dict[int, float]:
    """Bytes/us of each transfer, max-min fair: the fullest link settles the rates of all that use it, then the next.

    >>> fair_rates({1: ["a"], 2: ["a", "b"], 3: ["b"]}, {"a": 10.0, "b": 30.0})
    {1: 5.0, 2: 5.0, 3: 25.0}
    """
    users: dict[Link, set[int]] = {}
    for number, links in routes.items():
        for link in links:
            users.setdefault(link, set()).add(number)
    free = {link: bytes_per_us[link] for link in users}
    rates: dict[int, float] = {}
    while users:
        fullest = min(users, key=lambda link: free[link] / len(users[link]))
        share = free[fullest] / len(users[fullest])
        for number in users.pop(fullest):
            rates[number] = share
            for link in routes[number]:
                if link in users:
                    users[link].discard(number)
                    free[link] -= share
        users = {link: numbers for link, numbers in users.items() if numbers}
    return rates


def _delay_us(task: Task, network: Network) -> float:
    return task.busy_us + (network.latency_us if task.num_bytes else 0.0)


def _route(task: Task, network: Network) -> tuple[Link, ...]:
    return network.route(task.source, task.target)
