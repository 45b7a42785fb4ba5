"""Transports of a wave's buffers over the process group: asynchronous, counted, equal in result."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, Self

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from omn_dist.exchange.route import Messages, WaveRoute
from omn_dist.plan.geometry.traffic import Counts
from omn_dist.plan.plan import Plan

# torch 2.13 renamed it; both take (output, input, group, async_op).
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass
class Traffic:
    """What this rank has sent, counted where it is given to a collective."""

    num_collectives: int = 0
    num_bytes_sent: int = 0
    """Bytes for other ranks."""


class Pending:
    """Transfers in flight. ``wait`` makes the current stream wait for them (on CPU the caller)."""

    def __init__(self, works: Sequence[dist.Work | None] = (), unpack: Callable[[], None] | None = None) -> None:
        self._works = works
        self._unpack = unpack

    def wait(self) -> None:
        """After this, received buffers may be read and sent buffers overwritten."""
        for work in self._works:
            if work is not None:
                work.wait()
        if self._unpack is not None:
            self._unpack()


class WaveTransport(Protocol):
    """Moves the buffers of waves, which are flat bytes.

    Collective: all ranks of the group call the same methods in the same order.
    """

    traffic: Traffic

    def gather(self, number: int, sent: Tensor, received: Tensor) -> Pending:
        """Start the transfer of wave ``number`` from shards to owners."""
        ...

    def scatter(self, number: int, sent: Tensor, received: Tensor) -> Pending:
        """Start the transfer of wave ``number`` from owners to shards."""
        ...


class Local(WaveTransport):
    """The transport of a plan of one rank: nothing is sent."""

    def __init__(self) -> None:
        self.traffic = Traffic()

    @override
    def gather(self, number: int, sent: Tensor, received: Tensor) -> Pending:
        return Pending()

    @override
    def scatter(self, number: int, sent: Tensor, received: Tensor) -> Pending:
        return Pending()


class AllToAll(WaveTransport):
    """One uneven all-to-all to owners and one back."""

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
    """Bytes from and to each rank, the arguments of an all-to-all."""

    received: list[int]
    sent: list[int]

    @classmethod
    def of(cls, messages: Messages) -> Self:
        return cls(list(messages.received.num_bytes_by_rank), list(messages.sent.num_bytes_by_rank))


class AllGather(WaveTransport):
    """All-gather of the wave's directions, then a scatter of each owner's updates.

    It sends more than all-to-all does: messages are padded to one length, and every rank receives
    the whole wave, in buffers beside the slots.
    """

    def __init__(self, plan: Plan, rank: int, group: dist.ProcessGroup, device: torch.device) -> None:
        self.traffic = Traffic()
        self._rank = rank
        self._group = group
        self._ranks = dist.get_process_group_ranks(group)
        counts = list(plan.messages())
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

        def unpack_gathered() -> None:
            end = 0
            for source in range(num_ranks):
                size = int(counts[source, self._rank])
                start = source * length + int(counts[source, : self._rank].sum())
                received[end : end + size].copy_(everything[start : start + size])
                end += size

        return Pending((work,), unpack_gathered)

    @override
    def scatter(self, number: int, sent: Tensor, received: Tensor) -> Pending:
        counts, num_ranks = self._scatter_counts[number], len(self._ranks)
        works: list[dist.Work | None] = []
        copies = []
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
            copies.append((received[end : end + size], target[:size]))
            start += length
            end += size

        def unpack_scattered() -> None:
            for segment, message in copies:
                segment.copy_(message)

        return Pending(works, unpack_scattered)


def make_transport(
    plan: Plan, routes: Sequence[WaveRoute], rank: int, group: dist.ProcessGroup | None, device: torch.device
) -> WaveTransport:
    """The transport of the plan; ``group`` is ``None`` for a plan of one rank."""
    if group is None:
        return Local()
    return AllToAll(plan, routes, group) if plan.transport == "all_to_all" else AllGather(plan, rank, group, device)
