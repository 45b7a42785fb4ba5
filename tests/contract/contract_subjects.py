"""What is checked: the optimizer of a preset, plain or under FSDP2, and torch's AdamW beside it as the control."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from references import set_gradient, whole_tensors
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional

from omn_dist import PRESETS, DualOptimizer, build_parameter_groups

CONTROL = "torch.optim.AdamW"
"""The subject that has to pass every check of torch's contract: a check that it fails asks for too much."""
SUBJECTS = (CONTROL, *PRESETS)

_KEYWORDS = {"betas": "adamw_betas", "eps": "adamw_eps"}
"""Keywords of AdamW that have another name in DualOptimizer."""


class Network(nn.Module):
    """An embedding, two matrices on Muon, biases and a norm, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.up = nn.Linear(6, 9)
        self.norm = nn.LayerNorm(9)
        self.down = nn.Linear(9, 6, bias=False)
        self.lm_head = nn.Linear(6, 7, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """The loss of predicting each token from itself."""
        hidden = self.embed(tokens)
        hidden = hidden + self.down(functional.gelu(self.norm(self.up(hidden))))
        return functional.cross_entropy(self.lm_head(hidden).float(), tokens)


@dataclass(frozen=True)
class Subject:
    """A preset (or the control), and where its parameters are."""

    name: str
    folder: Path
    """An empty folder, the same on all ranks."""
    mesh: DeviceMesh | None = None
    """Parameters are sharded over it with FSDP2; plain without one."""

    @property
    def is_control(self) -> bool:
        return self.name == CONTROL

    def model(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        """A network with the same weights at each call."""
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = Network().to(dtype)
        if self.mesh is not None:
            fully_shard(model, mesh=self.mesh)
        return model

    def optimizer(self, groups: Any, **fields: Any) -> torch.optim.Optimizer:
        """An optimizer for what a program gives, with AdamW's names for the fields."""
        if self.is_control:
            return torch.optim.AdamW(groups, **fields)
        return DualOptimizer(groups, preset=self.name, **{_KEYWORDS.get(name, name): value for name, value in fields.items()})

    def make(self, dtype: torch.dtype = torch.float32, **fields: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
        """A model, and an optimizer with its groups."""
        model = self.model(dtype)
        return model, self.optimizer(self.groups(model), **fields)

    def groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """Groups for DualOptimizer; AdamW keeps the keys that it does not know."""
        return build_parameter_groups(model)

    def group(self, parameters: Any, algorithm: str = "muon", **fields: Any) -> dict[str, Any]:
        """One group as a program may write it."""
        return {"params": parameters, "algorithm": algorithm, **fields}

    def tensors(self, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
        """Parameters of these shapes, sharded by FSDP2 as those of one module where there is a mesh."""
        module = nn.ParameterList([nn.Parameter(tensor.to(dtype)) for tensor in whole_tensors(shapes, 3)])
        if self.mesh is not None:
            fully_shard(module, mesh=self.mesh)
        return list(module.parameters())


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def with_local(tensor: DTensor, own: Tensor) -> DTensor:
    """A DTensor like another, with this rank's part exchanged."""
    mesh, placements = tensor.device_mesh, tensor.placements
    return DTensor.from_local(own, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride())


def fill(parameters: Iterable[Tensor], seed: int) -> None:
    """Gradients that depend on ``seed`` only."""
    parameters = list(parameters)
    for parameter, gradient in zip(parameters, whole_tensors([tuple(p.shape) for p in parameters], 100 + seed), strict=True):
        set_gradient(parameter, gradient.to(parameter.dtype))  # type: ignore[arg-type]


def steps(optimizer: torch.optim.Optimizer, *seeds: int) -> None:
    """Steps with a gradient for every parameter."""
    for seed in seeds:
        fill(parameters_of(optimizer), seed)
        optimizer.step()


def tokens(seed: int = 0) -> Tensor:
    return torch.randint(7, (12,), generator=torch.Generator().manual_seed(seed))


def closure_for(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(tokens())
        loss.backward()
        return loss

    return closure


def weights(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """This rank's copies of the parameters."""
    return [local(parameter.detach()).clone() for parameter in parameters_of(optimizer)]


def bits(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """This rank's copies of parameters and state, by position and key."""
    found: dict[str, Any] = {}
    for number, parameter in enumerate(parameters_of(optimizer)):
        found[str(number)] = local(parameter.detach()).clone()
        for key, value in optimizer.state.get(parameter, {}).items():
            found[f"{number}.{key}"] = local(value).clone() if isinstance(value, Tensor) else value
    return found


def assert_equal(first: Any, second: Any, where: str = "") -> None:
    """Nested containers with equal bits in every tensor."""
    assert type(first) is type(second) or isinstance(first, float | int), f"{where}: {type(first)} and {type(second)}"
    if isinstance(first, Tensor):
        assert first.dtype == second.dtype, f"{where}: {first.dtype} and {second.dtype}"
        assert torch.equal(local(first), local(second)), f"{where}: other bits"
    elif isinstance(first, Mapping):
        assert first.keys() == second.keys(), f"{where}: on one side only {sorted(map(str, first.keys() ^ second.keys()))}"
        for key in first:
            assert_equal(first[key], second[key], f"{where}.{key}")
    elif isinstance(first, list | tuple):
        assert len(first) == len(second), f"{where}: lengths {len(first)} and {len(second)}"
        for position, (one, other) in enumerate(zip(first, second, strict=True)):
            assert_equal(one, other, f"{where}[{position}]")
    else:
        assert first == second, f"{where}: {first!r} and {second!r}"


def differ(first: list[Tensor], second: list[Tensor]) -> list[bool]:
    """Which tensors changed on this rank; shards without elements count as changed, so that ranks agree."""
    return [not one.numel() or not torch.equal(one, other) for one, other in zip(first, second, strict=True)]
