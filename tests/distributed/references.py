"""Short single-process references on whole tensors, and parameters that are sharded from whole ones."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

SHAPES = ((16, 16), (10, 3), (3, 8), (1, 16), (16, 1), (2, 8), (32, 8), (8, 32))


def whole_tensors(shapes: Sequence[tuple[int, ...]], seed: int) -> list[Tensor]:
    """Gaussian tensors, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def local_of(whole: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> Tensor:
    """This rank's part of a whole tensor: torch's own cuts, applied from the first mesh axis to the last."""
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    for size, position, placement in zip(mesh.shape, coordinate, placements, strict=True):
        if not isinstance(placement, Replicate):
            pieces, _ = placement._split_tensor(whole, size, with_padding=False, contiguous=True)  # type: ignore[attr-defined]
            whole = pieces[position]
    return whole.clone()


def sharded(whole: Tensor, mesh: DeviceMesh | None, placements: Sequence[Placement] = (Shard(0),)) -> nn.Parameter:
    """A parameter with these placements (by default FSDP2's over a one-axis mesh), or a plain one without a mesh."""
    if mesh is None:
        return nn.Parameter(whole.clone())
    local = local_of(whole, mesh, placements)
    return nn.Parameter(DTensor.from_local(local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()))


def set_gradient(parameter: nn.Parameter, whole: Tensor) -> None:
    """The part of a whole gradient that belongs to the parameter's shard."""
    if isinstance(parameter, DTensor):
        mesh, placements = parameter.device_mesh, parameter.placements
        local = local_of(whole, mesh, placements)
        parameter.grad = DTensor.from_local(local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())
    else:
        parameter.grad = whole.clone()


def whole(tensor: Tensor) -> Tensor:
    """The whole of a DTensor (collective), or a plain tensor itself."""
    if isinstance(tensor, DTensor):
        return tensor.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim).to_local().detach().clone()
    return tensor.detach().clone()


def is_shard_of(tensor: Tensor, expected: Tensor) -> bool:
    """Whether this rank's part of ``tensor`` has the bits of its part of the whole tensor ``expected``."""
    if isinstance(tensor, DTensor):
        return torch.equal(tensor.to_local(), local_of(expected, tensor.device_mesh, tensor.placements))
    return torch.equal(tensor, expected)


class OMNReference:
    """The OMN recipe on whole matrices, written apart from the package (K. Jordan's Muon with OMN's normalisation)."""

    def __init__(self, weights: Mapping[str, Tensor], lr: float = 0.01, weight_decay: float = 0.0) -> None:
        self.weights = {name: weight.clone() for name, weight in weights.items()}
        self.momentum = {name: torch.zeros_like(weight) for name, weight in weights.items()}
        self.lr, self.weight_decay = lr, weight_decay

    def step(self, gradients: Mapping[str, Tensor]) -> None:
        for name, gradient in gradients.items():
            momentum = self.momentum[name].mul_(0.95).add_(gradient)
            x = gradient.add(momentum, alpha=0.95).float()
            rows, columns = x.shape
            x = x / x.abs().max().clamp(min=1e-7)
            x = x.T if rows > columns else x
            x = x / (x.norm() + 1e-7)
            for _ in range(5):
                a = x @ x.T
                b = torch.addmm(a, a, a, beta=-4.7750, alpha=2.0315)
                x = torch.addmm(x, b, x, beta=3.4445)
            x = x.T if rows > columns else x
            weight = self.weights[name].mul_(1 - self.lr * self.weight_decay)
            weight.add_(x, alpha=-self.lr * math.sqrt(max(1, rows / columns)))
