"""What a parameter does in the network, and where that sends it."""

import math
import re
from dataclasses import dataclass
from typing import Literal

from omn_dist.plan.views import View

Algorithm = Literal["muon", "adamw"]
Role = Literal[
    "projection",
    "expert",
    "embedding",
    "table",
    "position",
    "head",
    "router",
    "gate",
    "norm",
    "bias",
    "scalar",
    "vector",
    "residual_query",
    "low_rank",
    "convolution",
    "stack",
    "fused",
]
"""What a parameter does. ``fused`` and ``stack`` are several matrices in one tensor whose layout nothing says."""
_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module|module)\.(?=.)")


@dataclass(frozen=True)
class Route:
    """Where one parameter goes, and why."""

    names: tuple[str, ...]
    """Every name under which the model knows it; the first is the one that groups carry."""
    shape: tuple[int, ...]
    role: Role
    algorithm: Algorithm
    has_decay: bool
    reason: str
    view: View | None = None
    """On Muon: how the parameter splits into matrices; ``None`` when it is one itself."""

    @property
    def name(self) -> str:
        """The first name."""
        return self.names[0]

    @property
    def num_elements(self) -> int:
        """Elements of the whole parameter."""
        return math.prod(self.shape)

    @property
    def num_adamw_elements(self) -> int:
        """Elements that AdamW updates: none, all, or the rows of a view that are no matrix."""
        if self.algorithm == "adamw":
            return self.num_elements
        return 0 if self.view is None else self.view.num_adamw_elements

    @property
    def num_matrices(self) -> int:
        """Matrices in this parameter."""
        if self.algorithm == "adamw":
            return 0
        return 1 if self.view is None else self.view.num_matrices


def plain_name(name: str) -> str:
    """A parameter's name without what wrappers (torch.compile, activation checkpointing, DDP) put into it."""
    return _WRAPPERS.sub("", name)
