"""Teams in execution: the exchanges of the ranks that work on one matrix, each team on a process group of its own."""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function
from typing_extensions import override

from omn_dist.algorithms.scratch import Scratch
from omn_dist.algorithms.team_newton_schulz import Team
from omn_dist.exchange.transport import Traffic, all_gather_single
from omn_dist.plan.ownership import Plan


class GroupTeam(Team):
    """A team whose members are the ranks of a process group, in its order. Every call is collective over them.

    Receives into ``scratch``, which all teams of a pipeline share.
    """

    def __init__(self, group: dist.ProcessGroup, traffic: Traffic, scratch: Scratch) -> None:
        self.size = dist.get_world_size(group)
        self._group = group
        self._traffic = traffic
        self._scratch = scratch

    @override
    def exchange(self, blocks: Tensor) -> Tensor:
        sent = blocks.contiguous()
        received = self._scratch.take("exchange", sent.shape, sent.dtype, sent.device)
        self._count(sent.nbytes // self.size)
        with record_function("omn_dist::team_exchange"):
            dist.all_to_all_single(_as_bytes(received), _as_bytes(sent), group=self._group)
        return received

    @override
    def gather(self, block: Tensor) -> Tensor:
        sent = block.contiguous()
        received = self._scratch.take("gather", (self.size, *sent.shape), sent.dtype, sent.device)
        self._count(sent.nbytes)
        with record_function("omn_dist::team_gather"):
            all_gather_single(_as_bytes(received), _as_bytes(sent), group=self._group)
        return received

    def _count(self, num_bytes: int) -> None:
        self._traffic.num_collectives += 1
        self._traffic.num_bytes_sent += (self.size - 1) * num_bytes


def make_teams(
    plan: Plan, rank: int, groups: Mapping[tuple[int, ...], dist.ProcessGroup], traffic: Traffic
) -> dict[int, GroupTeam]:
    """The team of each slice that ``rank`` owns, by the slice's index in the plan; ``groups`` by the plan's ranks.

    Every rank works for its teams in the order of waves, and in a wave in the plan's order, so no two wait for each other in a
    circle, however teams overlap.
    """
    scratch = Scratch()
    return {
        index: GroupTeam(groups[plan.teams[matrix.slice.whole]], traffic, scratch)
        for index, (matrix, owner) in enumerate(zip(plan.matrices, plan.owners, strict=True))
        if matrix.slice is not None and owner == rank
    }


def _as_bytes(tensor: Tensor) -> Tensor:
    """Flat bytes, which every backend moves whatever their dtype; shares memory."""
    return tensor.view(-1).view(torch.uint8)
