"""omn_dist: an FSDP2-native sharded dual optimizer, and the training system around it."""

from omn_dist.algorithms.newton_schulz import orthogonalize
from omn_dist.optim.matrices import plan_ownership
from omn_dist.optim.optimizer import DualOptimizer
from omn_dist.optim.presets import PRESETS, Preset
from omn_dist.optim.qk_clip import QKClip
from omn_dist.optim.rules.registry import register_rule
from omn_dist.roles.groups import build_parameter_groups

__version__ = "0.1.0"

__all__ = [
    "PRESETS",
    "DualOptimizer",
    "Preset",
    "QKClip",
    "build_parameter_groups",
    "orthogonalize",
    "plan_ownership",
    "register_rule",
]
