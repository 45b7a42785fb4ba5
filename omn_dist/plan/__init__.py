"""Who owns which matrix, and when it moves: pure data, the same on every rank, no process group."""

from omn_dist.plan.layout import Layout, Piece
from omn_dist.plan.matrix import Matrix
from omn_dist.plan.ownership import Plan, plan_matrices, plan_ownership

__all__ = ["Layout", "Matrix", "Piece", "Plan", "plan_matrices", "plan_ownership"]
