"""A team of threads in one process, for what the members of a team compute."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from omn_dist.algorithms.team_newton_schulz import Team


class _Thread(Team):
    def __init__(self, index: int, said: list[Tensor], barrier: threading.Barrier) -> None:
        self.size = len(said)
        self.num_calls = 0
        self._index, self._said, self._barrier = index, said, barrier

    def exchange(self, blocks: Tensor) -> Tensor:
        return torch.stack([said[self._index] for said in self._all(blocks)])

    def gather(self, block: Tensor) -> Tensor:
        return torch.stack(self._all(block))

    def _all(self, tensor: Tensor) -> list[Tensor]:
        self.num_calls += 1
        self._said[self._index] = tensor.clone()
        self._barrier.wait()
        everything = list(self._said)
        self._barrier.wait()
        return everything


def run_team(function: Callable[[Tensor, Team], Tensor], slices: Sequence[Tensor]) -> tuple[list[Tensor], int]:
    """``function`` on every member's slice at the same time: what each returns, and how many calls of the team each made."""
    size = len(slices)
    said, barrier = [torch.empty(0)] * size, threading.Barrier(size, timeout=30)
    members = [_Thread(index, said, barrier) for index in range(size)]
    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(function, part, member) for part, member in zip(slices, members, strict=True)]
        results = [future.result() for future in futures]
    (num_calls,) = {member.num_calls for member in members}
    return results, num_calls
