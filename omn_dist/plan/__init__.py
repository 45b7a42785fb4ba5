"""Who owns which matrix, and when it moves: pure data, the same on every rank, no process group."""

from omn_dist.plan.geometry.layout import Layout, Region
from omn_dist.plan.geometry.matrix import Matrix
from omn_dist.plan.plan import Plan, plan_matrices

__all__ = ["Layout", "Matrix", "Plan", "Region", "plan_matrices"]
