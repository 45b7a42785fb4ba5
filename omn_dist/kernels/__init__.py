"""Implementations of a step's operations, all with the same results.

One is chosen when an optimizer is built.
"""

from omn_dist.kernels.base import TORCH, Kernels
from omn_dist.kernels.choose import KernelChoice, choose_kernels

__all__ = ["TORCH", "KernelChoice", "Kernels", "choose_kernels"]
