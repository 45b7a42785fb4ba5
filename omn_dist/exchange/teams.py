"""Collectives of the teams of ranks that work on one matrix, each on a process group of its own."""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function
from typing_extensions import override

from omn_dist.algorithms.scratch import Scratch
from omn_dist.algorithms.team_newton_schulz import Team
from omn_dist.exchange.transport import Traffic, all_gather_single
from omn_dist.plan.plan import Plan


class GroupTeam(Team):
    """A team of the ranks of a process group, in the order of the group.

    It receives into ``scratch``, which all teams of a pipeline share. Every call is collective over
    the group.
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
    """The team of each slice that ``rank`` owns, by the slice's index in the plan.

    Every rank calls its teams in the order of waves, and in a wave in the order of the plan. So
    ranks of overlapping teams never wait for each other in a circle.

    Args:
        plan: with slices.
        rank: this process, among the ranks of the plan.
        groups: the process group of each team that ``rank`` is in, by the team's ranks in the plan.
        traffic: counts what the teams send.
    """
    scratch = Scratch()
    return {
        index: GroupTeam(groups[plan.teams[matrix.slice.whole]], traffic, scratch)
        for index, (matrix, owner) in enumerate(zip(plan.matrices, plan.owners, strict=True))
        if matrix.slice is not None and owner == rank
    }


def _as_bytes(tensor: Tensor) -> Tensor:
    """The tensor as flat bytes, which every backend sends whatever the dtype; a view."""
    return tensor.view(-1).view(torch.uint8)
