"""Short single-process references of the recipes on one whole matrix, written apart from the package, in fp64."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Triples = Sequence[tuple[float, float, float]]
QUINTIC: Triples = [(3.4445, -4.7750, 2.0315)] * 5
CUBIC: Triples = [(1.5, -0.5, 0.0)] * 5
_FITTED = [
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
]
POLAR_EXPRESS: Triples = [(a / 1.01, b / 1.01**3, c / 1.01**5) for a, b, c in _FITTED] + [(1.875, -1.25, 0.375)]


def polynomial_of(direction: Tensor, triples: Triples) -> Tensor:
    """The composed polynomial on the singular values of the Frobenius-normalised direction, by SVD."""
    left, values, right = torch.linalg.svd(direction.double(), full_matrices=False)
    values = values / values.norm() if values.norm() > 0 else values
    for a, b, c in triples:
        values = a * values + b * values**3 + c * values**5
    return (left * values) @ right


def rms_scale(rows: int, columns: int) -> float:
    return 0.2 * math.sqrt(max(rows, columns))


def muon(
    weight: Tensor,
    gradients: Sequence[Tensor],
    *,
    lr: float,
    decay: float,
    triples: Triples,
    scale: Callable[[int, int], float],
    momentum: str,
) -> Tensor:
    """The weight after Muon steps; ``momentum`` is ``"nesterov"`` (summed) or ``"ema"`` (averaged, no look-ahead)."""
    weight, buffer = weight.double(), torch.zeros_like(weight, dtype=torch.float64)
    for gradient in gradients:
        if momentum == "nesterov":
            buffer = 0.95 * buffer + gradient.double()
            direction = gradient.double() + 0.95 * buffer
        else:
            buffer = 0.95 * buffer + 0.05 * gradient.double()
            direction = buffer
        weight = (1 - lr * decay) * weight - lr * scale(*weight.shape) * polynomial_of(direction, triples)
    return weight


def normuon(weight: Tensor, gradients: Sequence[Tensor], *, lr: float, decay: float, published_code: bool) -> Tensor:
    """The weight after NorMuon steps in the form of the paper, or of its published code."""
    weight, buffer = weight.double(), torch.zeros_like(weight, dtype=torch.float64)
    rows, columns = weight.shape
    moment = torch.zeros(rows, 1, dtype=torch.float64)
    for gradient in gradients:
        buffer = 0.95 * buffer + 0.05 * gradient.double()
        direction = 0.05 * gradient.double() + 0.95 * buffer if published_code else buffer
        update = polynomial_of(direction, QUINTIC)
        moment = 0.95 * moment + 0.05 * (update * update).mean(dim=1, keepdim=True)
        normalised = update / (moment.sqrt() + 1e-10)
        if published_code:
            step = normalised * update.norm() / normalised.norm() * math.sqrt(max(1, rows / columns))
        else:
            step = 0.2 * math.sqrt(rows * columns) * normalised / normalised.norm()
        weight = (1 - lr * decay) * weight - lr * step
    return weight
