"""Newton-Schulz schedules as data: the polynomial of every iteration, with its normalisation and its source."""

from dataclasses import dataclass
from typing import Literal

Coefficients = tuple[float, float, float]


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The polynomials ``X <- a X + (b A + c A A) X`` with ``A = X X^T``, one triple for each iteration.

    A schedule is fitted for one normalisation of its input; with another it can flip directions. So the two are one object.
    """

    name: str
    coefficients: tuple[Coefficients, ...]
    normalization: Literal["frobenius"]
    source: str

    @property
    def num_steps(self) -> int:
        """How many iterations the schedule makes."""
        return len(self.coefficients)


QUINTIC = Schedule(
    name="quintic",
    coefficients=((3.4445, -4.7750, 2.0315),) * 5,
    normalization="frobenius",
    source="K. Jordan et al., Muon: an optimizer for hidden layers in neural networks (2024)",
)
