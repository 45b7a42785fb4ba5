"""Short single-process references on whole tensors, and parameters that are sharded from whole ones."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

SHAPES = ((16, 16), (10, 3), (3, 8), (1, 16), (16, 1), (2, 8), (32, 8), (8, 32))


def whole_tensors(shapes: Sequence[tuple[int, ...]], seed: int) -> list[Tensor]:
    """Gaussian tensors, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def sharded(whole: Tensor, mesh: DeviceMesh | None) -> nn.Parameter:
    """A parameter with FSDP2's placement over a one-axis mesh, or a plain one without a mesh."""
    return nn.Parameter(whole.clone() if mesh is None else distribute_tensor(whole.clone(), mesh, [Shard(0)]))


def set_gradient(parameter: nn.Parameter, whole: Tensor) -> None:
    """The shard of a whole gradient."""
    if isinstance(parameter, DTensor):
        parameter.grad = distribute_tensor(whole.clone(), parameter.device_mesh, parameter.placements)
    else:
        parameter.grad = whole.clone()


def whole(tensor: Tensor) -> Tensor:
    """The whole of a DTensor (collective), or a plain tensor itself."""
    if isinstance(tensor, DTensor):
        return tensor.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim).to_local().detach().clone()
    return tensor.detach().clone()


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
