"""What a parameter does in the network, and which algorithm updates it."""

import math
import re
from dataclasses import dataclass
from typing import Any, Literal, get_args

from omn_dist.plan.geometry.views import View
from omn_dist.roles.algorithms import algorithm_kind

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
"""What a parameter does. ``fused`` and ``stack`` hold several matrices in an unknown order."""
ROLES: tuple[str, ...] = get_args(Role)
_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module|module)\.(?=.)")


@dataclass(frozen=True)
class Route:
    """The algorithm that updates one parameter, and the reason."""

    names: tuple[str, ...]
    """All its names in the model, more than one for a tied weight; groups use the first."""
    shape: tuple[int, ...]
    role: Role
    algorithm: str
    """Name of a registered algorithm."""
    has_decay: bool
    reason: str
    view: View | None = None
    """How a matrix parameter splits into matrices; ``None`` when it is a single matrix."""
    fields: tuple[tuple[str, Any], ...] = ()
    """Names and values of the fields of its group that rules give, sorted by name."""

    @property
    def name(self) -> str:
        """The first name."""
        return self.names[0]

    @property
    def is_matrix(self) -> bool:
        """Whether the algorithm updates the parameter as one or more whole matrices."""
        return algorithm_kind(self.algorithm).takes_matrices

    @property
    def num_elements(self) -> int:
        """Elements of the whole parameter."""
        return math.prod(self.shape)

    @property
    def num_adamw_row_elements(self) -> int:
        """Elements in the rows of a view that belong to no matrix and that AdamW updates."""
        return 0 if self.view is None else self.view.num_adamw_elements

    @property
    def num_matrices(self) -> int:
        """Matrices in this parameter."""
        if not self.is_matrix:
            return 0
        return 1 if self.view is None else self.view.num_matrices


def plain_name(name: str) -> str:
    """A parameter name without the prefixes of torch.compile, checkpointing and DDP."""
    return _WRAPPERS.sub("", name)
