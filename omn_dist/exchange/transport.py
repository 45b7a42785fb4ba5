"""How a wave's buffers cross the process group: asynchronous, counted, with the same bits whichever way is taken."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, Self

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from omn_dist.exchange.route import Passage, WaveRoute
from omn_dist.plan.ownership import Plan
from omn_dist.plan.traffic import Counts, message_bytes

# torch 2.13 renamed it; both take (output, input, group, async_op).
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass
class Traffic:
    """What went over the process group: counted where it is handed to the collective."""

    num_collectives: int = 0
    num_bytes_sent: int = 0
    """Bytes for other ranks."""


class Pending:
    """Transfers in flight. ``wait`` makes the current stream (on CPU: the caller) wait and then finishes the delivery."""

    def __init__(self, works: Sequence[dist.Work | None] = (), deliver: Callable[[], None] | None = None) -> None:
        self._works = works
        self._deliver = deliver

    def wait(self) -> None:
        """Return when what follows may read the buffers that were filled, and overwrite those that were sent."""
        for work in self._works:
            if work is not None:
                work.wait()
        if self._deliver is not None:
            self._deliver()


class WaveTransport(Protocol):
    """Collective: all ranks of the group call the same methods in the same order. Buffers are flat bytes."""

    traffic: Traffic

    def gather(self, number: int, sent: Tensor, received: Tensor) -> Pending:
        """Wave ``number``: from shards to owners."""
        ...

    def scatter(self, number: int, sent: Tensor, received: Tensor) -> Pending:
        """Wave ``number``: from owners to shards."""
        ...


class Local(WaveTransport):
    """For a plan of one rank: nothing moves."""

    def __init__(self) -> None:
        self.traffic = Traffic()

    @override
    def gather(self, number: int, sent: Tensor, received: Tensor) -> Pending:
        return Pending()

    @override
    def scatter(self, number: int, sent: Tensor, received: Tensor) -> Pending:
        return Pending()


class AllToAll(WaveTransport):
    """One uneven all-to-all each way."""

    def __init__(self, plan: Plan, routes: Sequence[WaveRoute], group: dist.ProcessGroup) -> None:
        self.traffic = Traffic()
        self._moves = plan.moves
        self._gathers = [_Sizes.of(route.gather) for route in routes]
        self._scatters = [_Sizes.of(route.scatter) for route in routes]
        self._group = group

    @override
    def gather(self, number: int, sent: Tensor, received: Tensor) -> Pending:
        gathers, _ = self._moves[number]
        return self._exchange(self._gathers[number], sent, received) if gathers else Pending()

    @override
    def scatter(self, number: int, sent: Tensor, received: Tensor) -> Pending:
        _, scatters = self._moves[number]
        return self._exchange(self._scatters[number], sent, received) if scatters else Pending()

    def _exchange(self, sizes: "_Sizes", sent: Tensor, received: Tensor) -> Pending:
        self.traffic.num_collectives += 1
        self.traffic.num_bytes_sent += sum(sizes.sent)
        work = dist.all_to_all_single(received, sent, sizes.received, sizes.sent, group=self._group, async_op=True)
        return Pending((work,))


class _Sizes(NamedTuple):
    """Bytes from and to each rank: all that an all-to-all needs of a route."""

    received: list[int]
    sent: list[int]

    @classmethod
    def of(cls, passage: Passage) -> Self:
        return cls(list(passage.received.num_bytes_by_rank), list(passage.sent.num_bytes_by_rank))


class AllGather(WaveTransport):
    """All-gather of the wave's directions, scatter of each owner's updates: no all-to-all is needed.

    Messages are padded to one length, so it sends more, and it holds the whole wave on every rank in buffers of its own.
    """

    def __init__(self, plan: Plan, rank: int, group: dist.ProcessGroup, device: torch.device) -> None:
        self.traffic = Traffic()
        self._rank = rank
        self._group = group
        self._ranks = dist.get_process_group_ranks(group)
        counts = [message_bytes(plan.matrices, plan.owners, wave, plan.world_size, plan.wire_itemsize) for wave in plan.waves]
        self._gather_counts: list[Counts] = [gather for gather, _ in counts]
        self._scatter_counts: list[Counts] = [scatter for _, scatter in counts]
        longest = max((int(gather.sum(axis=1).max()) for gather in self._gather_counts), default=0)
        message = max((int(scatter.max()) for scatter in self._scatter_counts), default=0)

        def buffer(num_bytes: int) -> Tensor:
            return torch.zeros(num_bytes, device=device, dtype=torch.uint8)

        self._mine, self._all = buffer(longest), buffer(longest * plan.world_size)
        self._out, self._in = buffer(message * plan.world_size), buffer(message * plan.world_size)

    @override
    def gather(self, number: int, sent: Tensor, received: Tensor) -> Pending:
        counts, num_ranks = self._gather_counts[number], len(self._ranks)
        length = int(counts.sum(axis=1).max())
        if length == 0:
            return Pending()
        mine, everything = self._mine[:length], self._all[: length * num_ranks]
        mine[: sent.numel()].copy_(sent)
        self.traffic.num_collectives += 1
        self.traffic.num_bytes_sent += length * (num_ranks - 1)
        work = all_gather_single(everything, mine, group=self._group, async_op=True)

        def deliver() -> None:
            end = 0
            for source in range(num_ranks):
                size = int(counts[source, self._rank])
                start = source * length + int(counts[source, : self._rank].sum())
                received[end : end + size].copy_(everything[start : start + size])
                end += size

        return Pending((work,), deliver)

    @override
    def scatter(self, number: int, sent: Tensor, received: Tensor) -> Pending:
        counts, num_ranks = self._scatter_counts[number], len(self._ranks)
        works: list[dist.Work | None] = []
        places = []
        start = end = 0
        for owner, root in enumerate(self._ranks):
            length = int(counts[:, owner].max())
            if length == 0:
                continue
            target = self._in[start : start + length]
            messages: list[Tensor] | None = None
            if owner == self._rank:
                messages = []
                taken = 0
                for holder in range(num_ranks):
                    size = int(counts[holder, owner])
                    message = self._out[holder * length : (holder + 1) * length]
                    message[:size].copy_(sent[taken : taken + size])
                    messages.append(message)
                    taken += size
                self.traffic.num_bytes_sent += length * (num_ranks - 1)
            self.traffic.num_collectives += 1
            works.append(dist.scatter(target, messages, src=root, group=self._group, async_op=True))
            size = int(counts[self._rank, owner])
            places.append((target[:size], received[end : end + size]))
            start += length
            end += size

        def deliver() -> None:
            for arrived, place in places:
                place.copy_(arrived)

        return Pending(works, deliver)


def make_transport(
    plan: Plan, routes: Sequence[WaveRoute], rank: int, group: dist.ProcessGroup | None, device: torch.device
) -> WaveTransport:
    """The transport that the plan names; ``group`` is ``None`` for a plan of one rank."""
    if group is None:
        return Local()
    return AllToAll(plan, routes, group) if plan.transport == "all_to_all" else AllGather(plan, rank, group, device)
