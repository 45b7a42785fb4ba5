"""Grids of ranks: collectives along every axis of a mesh, and the comparison of descriptions."""

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from omn_dist.exchange.transport import all_gather_single


@dataclass(frozen=True)
class Grid:
    """The ranks of a mesh as one of them sees them. No process group is made for it."""

    groups: tuple[dist.ProcessGroup, ...]
    """This rank's group along each axis; axes of one rank are left out."""
    ranks: tuple[int, ...]
    """Global ranks, ascending."""

    @classmethod
    def of_mesh(cls, mesh: DeviceMesh) -> Self:
        """The grid of a mesh that this rank is in."""
        groups = [mesh.get_group(axis) for axis in range(mesh.ndim) if mesh.size(axis) > 1]
        return cls(tuple(groups), tuple(sorted(mesh.mesh.flatten().tolist())))

    @classmethod
    def of_group(cls, group: dist.ProcessGroup) -> Self:
        """The grid of one axis whose ranks are those of a process group."""
        ranks = tuple(sorted(dist.get_process_group_ranks(group)))
        return cls((group,) if len(ranks) > 1 else (), ranks)

    @property
    def key(self) -> tuple[int, tuple[int, ...], tuple[str, ...]]:
        """What sorts grids in one order on all ranks, large ones first."""
        return -len(self.ranks), self.ranks, tuple(group.group_name for group in self.groups)

    def maxima(self, numbers: Tensor, axes: Sequence[int] | None = None) -> Tensor:
        """The largest of each number over these axes of ``groups``, by default all. Collective."""
        found = numbers.clone()
        for axis in range(len(self.groups)) if axes is None else axes:
            dist.all_reduce(found, dist.ReduceOp.MAX, self.groups[axis])
        return found

    def gather(self, numbers: Tensor) -> Tensor:
        """The numbers of all ranks, ``[ranks, ...]``, in an order that is the same on all.

        Collective.
        """
        found = numbers[None]
        for group in self.groups:
            size = dist.get_world_size(group)
            gathered = found.new_empty(size * found.numel())
            all_gather_single(gathered, found.flatten(), group=group)
            found = gathered.view(-1, *numbers.shape)
        return found

    def gather_lines(self, lines: Sequence[str]) -> list[tuple[int, Sequence[str]]]:
        """The global rank and the lines of every rank, by rank. Collective."""
        found: list[tuple[int, Sequence[str]]] = [(dist.get_rank(), lines)]
        for group in self.groups:
            parts: list[list[tuple[int, Sequence[str]]]] = [[] for _ in range(dist.get_world_size(group))]
            dist.all_gather_object(parts, found, group=group)
            found = list(itertools.chain.from_iterable(parts))
        return sorted(found, key=lambda of_rank: of_rank[0])


class Difference(NamedTuple):
    """The first line in which two ranks differ."""

    first_rank: int
    other_rank: int
    first_line: str
    other_line: str


def find_difference(lines: Sequence[str], grid: Grid, device: torch.device) -> Difference | None:
    """Compare descriptions over all ranks of a grid. Collective: one small gather along each axis.

    Returns:
        On all ranks the same: ``None`` where all have the same lines, else where the first rank and
        one after it differ.
    """
    if not grid.groups:
        return None
    digest = hashlib.sha256()
    for line in lines:
        digest.update(f"{len(line)} {line}".encode())
    mine = torch.tensor(list(digest.digest()), dtype=torch.uint8, device=device)
    if bool((grid.gather(mine) == mine).all()):
        return None
    (first_rank, first), *others = grid.gather_lines(lines)
    for rank, other in others:
        for pair in itertools.zip_longest(first, other, fillvalue="nothing more"):
            if pair[0] != pair[1]:
                return Difference(first_rank, rank, *pair)
    return None


def first_problem(mine: str | None, grids: Sequence[Grid]) -> str | None:
    """What the first rank that found a problem says; ``None`` when no rank found any. Collective.

    Args:
        mine: what this rank found.
        grids: those that this rank is in, in one order on all ranks.
    """
    # Twice, so that what is found in one grid reaches those that are only in another. Each rank
    # passes each of its grids equally often, whatever other grids it is in.
    for grid in (*grids, *grids):
        said = grid.gather_lines([] if mine is None else [mine])
        mine = next((lines[0] for _, lines in said if lines), None)
    return mine
