"""Newton-Schulz schedules as data.

A schedule has the polynomial of every iteration, the normalisation that it was fitted for, and its
source.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, get_args

import numpy as np

from omn_dist.settings import SettingsError, unknown_name

Coefficients = tuple[float, float, float]
Normalization = Literal["frobenius"]
NORMALIZATIONS: tuple[str, ...] = get_args(Normalization)

LARGEST_SINGULAR_VALUE = 2.0
"""The largest value to which a schedule may map a normalised singular value.

Polar Express with fewer steps than published reaches 1.99.
"""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The polynomials ``X <- a X + (b A + c A A) X`` with ``A = X X^T``, one for each iteration.

    A schedule is fitted for one normalisation of its input, and can flip directions with another.
    So the two are one object, which is checked when it is built. The normalisation leaves singular
    values in (0, 1]; on all of them the composed polynomial must be positive, so that it flips no
    direction, and at most 2, so that nothing diverges.

    Raises:
        SettingsError: no step, a triple that is not three finite numbers, an unknown normalisation,
            or a polynomial that flips or blows up a singular value, with that value.
    """

    name: str
    coefficients: tuple[Coefficients, ...]
    normalization: Normalization
    source: str

    def __post_init__(self) -> None:
        if self.normalization not in NORMALIZATIONS:
            raise SettingsError(unknown_name("normalisation of a schedule", str(self.normalization), NORMALIZATIONS))
        if not self.coefficients:
            raise SettingsError(f"schedule {self.name}: found no step, expected at least one triple (a, b, c)")
        for triple in self.coefficients:
            if len(triple) != 3 or not all(math.isfinite(number) for number in triple):
                raise SettingsError(f"schedule {self.name}: found {triple!r}, expected three finite numbers (a, b, c)")
        # Half of the points are logarithmic, for the small values that the first steps lift.
        values = np.concatenate((np.logspace(-9, 0, 2001), np.linspace(1e-3, 1, 2001)))
        mapped = self.mapped(values)
        for wrong, expected in ((mapped <= 0, "a positive value"), (~(mapped <= LARGEST_SINGULAR_VALUE), "at most 2")):
            if wrong.any():
                value, found = float(values[wrong][0]), float(mapped[wrong][0])
                raise SettingsError(
                    f"schedule {self.name}: maps the singular value {value:.4g} to {found:.4g}, expected {expected} everywhere on "
                    f"(0, 1]; it was fitted for another normalisation than {self.normalization}, or has too few steps"
                )

    @property
    def ns_steps(self) -> int:
        """Number of iterations."""
        return len(self.coefficients)

    @property
    def is_cubic(self) -> bool:
        """Whether no step has a fifth-order term.

        Such a schedule needs no square of the Gram matrix.
        """
        return all(c == 0 for _, _, c in self.coefficients)

    def mapped(self, values: "np.ndarray[tuple[int], np.dtype[np.float64]]") -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
        """The composed polynomial of normalised singular values, in fp64: ``[values]``."""
        with np.errstate(over="ignore", invalid="ignore"):
            for a, b, c in self.coefficients:
                square = values * values
                values = values * (a + square * (b + square * c))
        return values

    def band(self, smallest: float = 1e-3) -> tuple[float, float]:
        """The smallest and the largest value to which those from ``smallest`` to 1 are mapped."""
        mapped = self.mapped(np.logspace(math.log10(smallest), 0, 20001))
        return float(mapped.min()), float(mapped.max())


_MUON = "K. Jordan et al., Muon: an optimizer for hidden layers in neural networks (2024)"
_QUINTIC_STEP: Coefficients = (3.4445, -4.7750, 2.0315)
_POLAR_EXPRESS_SAFETY = 1.01
_POLAR_EXPRESS_STEPS: tuple[Coefficients, ...] = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
)
_POLAR_EXPRESS_LIMIT: Coefficients = (1.875, -1.25, 0.375)


def _polar_express(ns_steps: int) -> tuple[Coefficients, ...]:
    """The triples of so many steps.

    Fitted steps act on x / 1.01, so that rounding cannot carry a value out of their range. The
    limit step is used as it is.
    """
    safety = _POLAR_EXPRESS_SAFETY
    fitted = tuple((a / safety, b / safety**3, c / safety**5) for a, b, c in _POLAR_EXPRESS_STEPS[:ns_steps])
    return fitted + (_POLAR_EXPRESS_LIMIT,) * (ns_steps - len(fitted))


QUINTIC = Schedule(name="quintic", coefficients=(_QUINTIC_STEP,) * 5, normalization="frobenius", source=_MUON)

SCHEDULES: Mapping[str, Schedule] = MappingProxyType(
    {
        schedule.name: schedule
        for schedule in (
            QUINTIC,
            Schedule(
                name="tuned_quintic",
                coefficients=(
                    (4.0848, -6.8946, 2.9270),
                    (3.9505, -6.3029, 2.6377),
                    (3.7418, -5.5913, 2.3037),
                    (2.8769, -3.1427, 1.2046),
                    (2.8366, -3.0525, 1.2012),
                ),
                normalization="frobenius",
                source="a step-by-step fit of the quintic that speedruns of small language models use (2025)",
            ),
            Schedule(
                name="polar_express",
                coefficients=_polar_express(8),
                normalization="frobenius",
                source="N. Amsel et al., The Polar Express, arXiv 2505.16932 (2025)",
            ),
            Schedule(
                name="cans",
                coefficients=(
                    (8.4703, -25.1081, 18.6293),
                    (4.1828, -3.1087, 0.5806),
                    (3.9619, -2.9541, 0.5630),
                    (3.2866, -2.4647, 0.5074),
                    (2.2737, -1.6447, 0.4162),
                ),
                normalization="frobenius",
                source="E. Grishina et al., Newton-Schulz iteration via Chebyshev-type polynomials, arXiv 2506.10935 (2025)",
            ),
            Schedule(
                name="deepseek_v4",
                coefficients=(_QUINTIC_STEP,) * 8 + ((2.0, -1.5, 0.5),) * 2,
                normalization="frobenius",
                source="DeepSeek-V4 technical report (2026)",
            ),
            Schedule(
                name="cubic",
                coefficients=((1.5, -0.5, 0.0),) * 5,
                normalization="frobenius",
                source="the classical Newton-Schulz iteration (N. Higham, Functions of Matrices, 2008)",
            ),
        )
    }
)
"""By name, each with the number of steps that it was published with."""

_REPEATED: Mapping[str, Coefficients] = MappingProxyType({"quintic": _QUINTIC_STEP, "cubic": (1.5, -0.5, 0.0)})


def make_schedule(schedule: str | Schedule | Sequence[Coefficients], ns_steps: int | None = None) -> Schedule:
    """A published schedule, or one of your own.

    Args:
        schedule: a name of ``SCHEDULES``, a :class:`Schedule`, or triples (a, b, c) for input of
            Frobenius norm one at most.
        ns_steps: the number of steps, for schedules that are defined for any number: ``quintic``,
            ``cubic`` and ``polar_express``. ``None``: as published.

    Raises:
        SettingsError: an unknown name, a number of steps that the schedule does not have, or
            triples that flip a direction.
    """
    if isinstance(schedule, str):
        if schedule not in SCHEDULES:
            raise SettingsError(unknown_name("schedule", schedule, SCHEDULES))
        found = SCHEDULES[schedule]
    elif isinstance(schedule, Schedule):
        found = schedule
    else:
        found = Schedule(name="own", coefficients=tuple(schedule), normalization="frobenius", source="the user")
    if ns_steps is None or ns_steps == found.ns_steps:
        return found
    if ns_steps < 1:
        raise SettingsError(f"ns_steps: found {ns_steps}, expected at least 1")
    if found.name == "polar_express":
        coefficients = _polar_express(ns_steps)
    elif found.name in _REPEATED:
        coefficients = (_REPEATED[found.name],) * ns_steps
    else:
        raise SettingsError(
            f"ns_steps: found {ns_steps} with schedule {found.name}, which is fitted for {found.ns_steps}; leave it out, or "
            "take polar_express, quintic or cubic, which are defined for any number"
        )
    return Schedule(name=found.name, coefficients=coefficients, normalization=found.normalization, source=found.source)
