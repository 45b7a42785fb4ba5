"""How a wave's buffers cross the process group: asynchronous, counted, and with the same bits whichever way is taken."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from omn_dist.exchange.route import WaveRoute
from omn_dist.plan.ownership import Plan
from omn_dist.plan.traffic import is_replicated, message_counts

# torch 2.13 renamed it; both take (output, input, group, async_op).
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass
class Traffic:
    """What went over the process group: counted where it is handed to the collective."""

    num_collectives: int = 0
    num_elements_sent: int = 0
    """Elements for other ranks."""


class Pending:
    """Transfers in flight. ``wait`` makes the current stream (on CPU: the caller) wait and then finishes the delivery."""

    def __init__(self, works: Sequence[dist.Work | None], deliver: Callable[[], None] | None = None) -> None:
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
    """Collective: all ranks of the group call the same methods in the same order."""

    traffic: Traffic

    def gather(self, number: int, shard_side: Tensor, owner_side: Tensor) -> Pending:
        """Wave ``number``: fill the owner sides from the shard sides."""
        ...

    def scatter(self, number: int, owner_side: Tensor, shard_side: Tensor) -> Pending:
        """Wave ``number``: fill the shard sides from the owner sides."""
        ...


class AllToAll(WaveTransport):
    """One uneven all-to-all each way."""

    def __init__(self, routes: Sequence[WaveRoute], group: dist.ProcessGroup | None) -> None:
        self.traffic = Traffic()
        self._routes = routes
        self._group = group

    @override
    def gather(self, number: int, shard_side: Tensor, owner_side: Tensor) -> Pending:
        route = self._routes[number]
        return self._exchange(shard_side, route.shard_side.counts, owner_side, route.owner_side.counts)

    @override
    def scatter(self, number: int, owner_side: Tensor, shard_side: Tensor) -> Pending:
        route = self._routes[number]
        return self._exchange(owner_side, route.owner_side.counts, shard_side, route.shard_side.counts)

    def _exchange(self, outgoing: Tensor, send: Sequence[int], incoming: Tensor, receive: Sequence[int]) -> Pending:
        if self._group is None:
            return Pending(())
        self.traffic.num_collectives += 1
        self.traffic.num_elements_sent += sum(send)
        work = dist.all_to_all_single(incoming, outgoing, list(receive), list(send), group=self._group, async_op=True)
        return Pending((work,))


class AllGather(WaveTransport):
    """All-gather of the wave's directions, scatter of each owner's updates: no all-to-all is needed.

    Messages are padded to one length, so it sends more, and it holds the whole wave on every rank in buffers of its own.
    """

    def __init__(self, plan: Plan, rank: int, group: dist.ProcessGroup | None, device: torch.device, dtype: torch.dtype) -> None:
        self.traffic = Traffic()
        self._rank = rank
        self._group = group
        self._ranks = dist.get_process_group_ranks(group) if group is not None else [0]
        self._counts = [message_counts(plan.matrices, plan.owners, wave, plan.world_size) for wave in plan.waves]
        longest = max((int(counts.sum(axis=1).max()) for counts in self._counts), default=0)
        message = max((int(counts.max()) for counts in self._counts), default=0)
        self._mine = torch.empty(longest, device=device, dtype=dtype)
        self._all = torch.empty(longest * plan.world_size, device=device, dtype=dtype)
        self._out = torch.empty(message * plan.world_size, device=device, dtype=dtype)
        self._in = torch.empty(message * plan.world_size, device=device, dtype=dtype)

    @override
    def gather(self, number: int, shard_side: Tensor, owner_side: Tensor) -> Pending:
        if self._group is None:
            return Pending(())
        counts = self._counts[number]
        length = int(counts.sum(axis=1).max())
        mine, everything = self._mine[:length], self._all[: length * len(self._ranks)]
        mine[: shard_side.numel()].copy_(shard_side)
        mine[shard_side.numel() :].zero_()
        self.traffic.num_collectives += 1
        self.traffic.num_elements_sent += length * (len(self._ranks) - 1)
        work = all_gather_single(everything, mine, group=self._group, async_op=True)

        def deliver() -> None:
            end = 0
            for source in range(len(self._ranks)):
                size = int(counts[source, self._rank])
                start = source * length + int(counts[source, : self._rank].sum())
                owner_side[end : end + size].copy_(everything[start : start + size])
                end += size

        return Pending((work,), deliver)

    @override
    def scatter(self, number: int, owner_side: Tensor, shard_side: Tensor) -> Pending:
        if self._group is None:
            return Pending(())
        counts = self._counts[number]
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
                sent = 0
                for holder in range(len(self._ranks)):
                    size = int(counts[holder, owner])
                    message = self._out[holder * length : (holder + 1) * length]
                    message[:size].copy_(owner_side[sent : sent + size])
                    message[size:].zero_()
                    messages.append(message)
                    sent += size
                self.traffic.num_elements_sent += length * (len(self._ranks) - 1)
            self.traffic.num_collectives += 1
            works.append(dist.scatter(target, messages, src=root, group=self._group, async_op=True))
            size = int(counts[self._rank, owner])
            places.append((target[:size], shard_side[end : end + size]))
            start += length
            end += size

        def deliver() -> None:
            for arrived, place in places:
                place.copy_(arrived)

        return Pending(works, deliver)


class Replicated(WaveTransport):
    """For matrices that lie whole on every rank: directions need no transport, the updates of all owners go to everybody."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.traffic = Traffic()
        self._group = group

    @override
    def gather(self, number: int, shard_side: Tensor, owner_side: Tensor) -> Pending:
        return Pending(())

    @override
    def scatter(self, number: int, owner_side: Tensor, shard_side: Tensor) -> Pending:
        if self._group is None:
            return Pending(())
        self.traffic.num_collectives += 1
        self.traffic.num_elements_sent += shard_side.numel() - owner_side.numel()
        return Pending((all_gather_single(shard_side, owner_side, group=self._group, async_op=True),))


def make_transport(
    plan: Plan,
    routes: Sequence[WaveRoute],
    rank: int,
    group: dist.ProcessGroup | None,
    device: torch.device,
    dtype: torch.dtype,
) -> WaveTransport:
    """The transport that the plan names; ``group`` is ``None`` for a plan of one rank."""
    if is_replicated(plan.matrices):
        return Replicated(group)
    if plan.transport == "all_to_all":
        return AllToAll(routes, group)
    return AllGather(plan, rank, group, device, dtype)
