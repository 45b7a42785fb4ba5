"""A model and its optimizer, plain or on ranks, with the operations of :mod:`program` as methods."""

import copy
import io
import itertools
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from random import Random
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from program import DTYPES, EVERY_PARAMETER, Block, Layout, Program
from tensors import elsewhere, gaussian, like, mapped, mesh_of, part_of, piece, placements, sharded, whole
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from omn_dist import DualOptimizer
from omn_dist.optim.checkpoint import optimizer_state_by_name
from omn_dist.plan.geometry.views import View

_TORCH_OPTIONS = {
    "torch_full": StateDictOptions(full_state_dict=True),
    "torch_sharded": StateDictOptions(),
    "torch_flat": StateDictOptions(flatten_optimizer_state_dict=True),
}


class Saved(NamedTuple):
    how: str
    state: dict[str, Any]
    num_groups: int
    num_layouts: int


class Machine:
    """Runs a program: plain as the reference, or on ranks.

    Args:
        program: what is run.
        world_size: of the ranks; ``None`` for the reference.
    """

    def __init__(self, program: Program, world_size: int | None) -> None:
        self.program, self.world_size = program, world_size
        self.sharded: Machine = self
        """The machine on ranks, which knows which part of a gradient one rank holds."""
        self.modules = nn.ModuleList()
        self.model = nn.ModuleDict({"blocks": self.modules})
        self.blocks: list[Block] = []
        self.has_masters: bool = program.options["master_weights"]
        self.saved: Saved | None = None
        self.replaced: dict[Tensor, Tensor] = {}
        """By new parameter, the one that stood in its place at the last step."""
        self.absent: dict[str, set[tuple[int, ...]]] = {}
        """By name, the parts whose gradient was dropped on their rank only."""
        self.num_layouts = 0
        self.sent_early = self.spoiled = False
        self.layout: Layout | None = None
        for number, block in enumerate(program.blocks):
            self._add_block(block, number)
        self._spread(program.layout)
        self.optimizer = self._build()
        self.take: Callable[[], None] = self.optimizer.step

    # --- the model ---------------------------------------------------------------------------

    @property
    def is_reference(self) -> bool:
        return self.world_size is None

    def named(self) -> dict[str, Tensor]:
        """The parameters that the optimizer steps, by name."""
        groups = self.optimizer.param_groups
        return {name: p for group in groups for name, p in zip(group["param_names"], group["params"], strict=True)}

    def state_of(self, parameter: Tensor) -> Mapping[str, Any]:
        """Without making an entry; that of the parameter before while a replacement was not noticed."""
        state = self.optimizer.state
        return state.get(parameter) or state.get(self.replaced.get(parameter, parameter)) or {}

    def _add_block(self, block: Block, seed: int) -> None:
        module = nn.Module()
        for index, shape in enumerate(block.shapes):
            weight = gaussian(f"{self.program.seed} {seed} {index}", shape, DTYPES[block.dtype])
            module.register_parameter(f"w{index}", nn.Parameter(weight))
        self.modules.append(module)
        self.blocks.append(block)

    def _spread(self, layout: Layout | None, blocks: Sequence[nn.Module] | None = None) -> None:
        """Shard blocks in place, by default all; a reference and a plain layout stay as they are."""
        self.layout = layout
        if layout is None or self.world_size is None:
            return
        mesh = mesh_of(layout.mesh_shape(self.world_size))
        for module in self.modules if blocks is None else blocks:
            if layout.kind == "fsdp":
                fully_shard(module, mesh=mesh)
                continue
            for name, parameter in list(module.named_parameters()):
                random = Random(f"{layout.seed} {name} {tuple(parameter.shape)}")
                module.register_parameter(name, sharded(parameter, mesh, placements(random, parameter.ndim, mesh.ndim)))

    def _group(self, number: int) -> dict[str, Any]:
        block, module = self.blocks[number], self.modules[number]
        named = {f"blocks.{number}.{name}": parameter for name, parameter in module.named_parameters()}
        return {"params": list(named.values()), "param_names": list(named), "algorithm": block.algorithm, **block.fields}

    def _build(self) -> DualOptimizer:
        options = dict(self.program.options) | {"master_weights": self.has_masters}
        if self.program.shares_copies and not self.is_reference:
            options["process_group"] = dist.group.WORLD
        return DualOptimizer([self._group(number) for number in range(len(self.blocks))], **options)

    def _take_over(self, optimizer: DualOptimizer) -> None:
        self.optimizer, self.take = optimizer, optimizer.step
        self.sent_early = self.spoiled = False

    def _chosen(self, seed: int, share: float) -> list[str]:
        random = Random(seed)
        return [name for name in self.named() if share == EVERY_PARAMETER or random.random() < share]

    def _group_of(self, name: str) -> dict[str, Any]:
        return next(group for group in self.optimizer.param_groups if name in group["param_names"])

    # --- gradients ---------------------------------------------------------------------------

    def backward(self, seed: int, share: float, scale: float, early: bool) -> None:
        # Once gradients were sent early, every backward before the step has to.
        early = (early or self.sent_early) and self.program.options["transport"] == "all_to_all"
        way: AbstractContextManager[None] = self.optimizer.overlap_backward() if early else nullcontext()
        with way:
            self._accumulate(seed, share, scale)
        self.sent_early, self.spoiled = early, False

    def _accumulate(self, seed: int, share: float, scale: float) -> None:
        named, names = self.named(), self._chosen(seed, share)
        for name in Random(seed).sample(names, len(names)):
            parameter = named[name]
            if parameter.requires_grad:
                gradient = gaussian(f"{seed} {name}", parameter.shape, parameter.dtype) * scale
                local = parameter.to_local() if isinstance(parameter, DTensor) else parameter.view_as(parameter)
                torch.autograd.backward([local], [part_of(parameter, gradient)])
                self.absent.pop(name, None)

    def step(self) -> None:
        self._discard_early()
        self.take()
        self._stepped()

    def step_closure(self, seed: int, scale: float) -> None:
        self.spoiled = self.sent_early
        self._discard_early()

        def closure() -> float:
            self.optimizer.zero_grad()
            self._accumulate(seed, EVERY_PARAMETER, scale)
            return 1.5

        assert self.optimizer.step(closure) == 1.5
        self._stepped()

    def _discard_early(self) -> None:
        """What was sent is of no use: as documented, enter overlap_backward again."""
        if self.spoiled:
            with self.optimizer.overlap_backward():
                pass

    def _stepped(self) -> None:
        self.sent_early = self.spoiled = False
        self.replaced = {}

    def zero_grad(self, set_to_none: bool) -> None:
        self.spoiled = self.sent_early
        self.optimizer.zero_grad(set_to_none=set_to_none)
        if set_to_none:
            self.absent = {}

    def drop_gradients(self, seed: int, share: float, on: str) -> None:
        self.spoiled = self.sent_early
        for name in self._chosen(seed, share):
            parameter = self.named()[name]
            if parameter.grad is None and name not in self.absent:
                continue
            lost = self.sharded.part_to_drop(name, seed) if on == "one part" else ()
            if lost is None:
                continue
            if lost == ():
                parameter.grad = None
                self.absent.pop(name, None)
            elif self.is_reference:
                parameter.grad = parameter.grad.flatten().index_fill(0, torch.tensor(lost), 0).view_as(parameter)
            else:
                self.absent.setdefault(name, set()).add(lost)
                if self._own_part(parameter) == lost:
                    parameter.grad = None

    def part_to_drop(self, name: str, seed: int) -> tuple[int, ...] | None:
        """Elements whose gradient one rank (or its copies) loses; ``()``: all; ``None``: cannot be followed by whole tensors."""
        parameter, group = self.named()[name], self._group_of(name)
        if group["algorithm"] == "adamw" or View.from_group(group) is not None:
            # A shard of AdamW, or a matrix of a stack, of which no rank has a gradient is left alone.
            return None
        if not isinstance(parameter, DTensor):
            return ()
        mesh, placements = parameter.device_mesh, parameter.placements
        index = torch.arange(parameter.numel()).view(parameter.shape)
        coordinates = itertools.product(*map(range, mesh.shape))
        parts = {piece(index, mesh.shape, coordinate, placements) for coordinate in coordinates} - {()}
        present = sorted(parts - self.absent.get(name, set()))
        return Random(seed).choice(present) if len(present) > 1 else ()

    def _own_part(self, parameter: Tensor) -> tuple[int, ...]:
        return tuple(part_of(parameter, torch.arange(parameter.numel()).view(parameter.shape)).flatten().tolist())

    def clip(self, value: float) -> None:
        groups = [group for group in self.optimizer.param_groups if not self.sent_early or group["algorithm"] == "adamw"]
        if parameters := [parameter for group in groups for parameter in group["params"] if parameter.grad is not None]:
            # One by one: torch's operations on lists refuse tensors with a lazy sign.
            nn.utils.clip_grad_value_(parameters, value, foreach=False)

    def odd_gradients(self, seed: int, memory: str) -> None:
        if self.sent_early:
            return
        for name in self._chosen(seed, 0.7):
            parameter = self.named()[name]
            if parameter.grad is not None and parameter.ndim == 2:
                local = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
                parameter.grad = like(parameter, elsewhere(local, memory))

    def set(self, field: str, value: float | str, seed: int, share: float) -> None:
        random = Random(seed)
        for group in self.optimizer.param_groups:
            if field in group and random.random() < share:
                group[field] = torch.tensor(0.02) if value == "tensor" else value
        self.spoiled |= self.sent_early and field == "momentum"

    def read(self, what: str) -> None:
        optimizer = self.optimizer
        if what == "repr":
            repr(optimizer)
        elif what == "state_dict":
            optimizer.state_dict()
        elif what == "plans":
            assert all(str(plan) for plan in optimizer.plans)
            assert optimizer.bytes_sent >= 0 <= optimizer.num_collectives
        else:
            optimizer_state_by_name(optimizer)

    def freeze(self, seed: int, share: float) -> None:
        self.spoiled = self.sent_early
        for name in self._chosen(seed, share):
            parameter = self.named()[name]
            parameter.requires_grad_(False)
            parameter.grad = None
            self.absent.pop(name, None)

    def unfreeze(self) -> None:
        for parameter in self.named().values():
            parameter.requires_grad_(True)

    # --- others write weights ----------------------------------------------------------------

    @torch.no_grad()
    def write(self, seed: int, share: float, way: str) -> None:
        for name in self._chosen(seed, share):
            parameter = self.named()[name]
            other = like(parameter, part_of(parameter, gaussian(f"{seed} {name}", parameter.shape, parameter.dtype)))
            if way == "copy":
                parameter.copy_(other)
            elif way == "data":
                parameter.data.copy_(other)
            elif way == "scale":
                parameter.mul_(0.5)
            elif way == "rows":
                # As QK-Clip scales the rows of some heads.
                factors = torch.ones(parameter.shape, dtype=parameter.dtype)
                factors[: (len(factors) + 1) // 2] = 0.7
                parameter.mul_(like(parameter, part_of(parameter, factors)))
            else:
                parameter.mul_(0.75).add_(other, alpha=0.25)

    @torch.no_grad()
    def swap_and_back(self, seed: int, reads: bool) -> None:
        before = {name: parameter.detach().clone() for name, parameter in self.named().items()}
        self.write(seed, EVERY_PARAMETER, "copy")
        if reads:
            self.optimizer.state_dict()
        for name, parameter in self.named().items():
            parameter.copy_(before[name])

    # --- checkpoints -------------------------------------------------------------------------

    def save(self, how: str) -> None:
        optimizer = self.optimizer
        if how == "live":
            state = optimizer.state_dict()
        elif how == "copy":
            state = copy.deepcopy(optimizer.state_dict())
        elif how == "whole":
            file = io.BytesIO()
            torch.save(mapped(optimizer.state_dict(), whole), file)
            file.seek(0)
            state = torch.load(file, weights_only=True)
        elif how == "torch_flat" and any(not parameter.requires_grad for parameter in self.named().values()):
            # torch flattens no state where a parameter has none.
            return
        else:
            state = copy.deepcopy(get_optimizer_state_dict(self.model, optimizer, options=_TORCH_OPTIONS[how]))
        self.saved = Saved(how, state, len(self.blocks), self.num_layouts)

    def load(self, into: str) -> None:
        if self.saved is None:
            self.save("copy")
        assert self.saved is not None
        how, state, num_groups, num_layouts = self.saved
        if num_layouts != self.num_layouts and how not in ("whole", "torch_full"):
            # A checkpoint of shards is for these shards.
            return
        optimizer = self._build() if into == "fresh" else self.optimizer
        if how.startswith("torch_"):
            if num_groups != len(self.blocks) or any(not parameter.requires_grad for parameter in self.named().values()):
                # torch's own helpers end in errors of their own.
                return
            set_optimizer_state_dict(self.model, optimizer, copy.deepcopy(state), options=_TORCH_OPTIONS[how])
        else:
            optimizer.load_state_dict(state)
        self._take_over(optimizer)

    def load_damaged(self, seed: int, damage: str, on: str) -> None:
        state = copy.deepcopy(self.optimizer.state_dict())
        random = Random(seed)
        index = random.choice(sorted(state["state"]) or [0])
        entry, name = state["state"].get(index, {}), list(self.named())[index]
        key = next((key for key in entry if key in ("momentum_buffer", "exp_avg")), None)
        refused = damage in ("shape", "foreign")
        if key is None and damage in ("shape", "foreign", "missing", "wider"):
            return
        # Ranks with plain tensors are programs of their own, which tell each other nothing.
        alone = not refused or on == "every rank" or self.world_size is None or self.layout is None
        here = alone or seed % self.world_size == dist.get_rank()
        if damage == "shape" and here:
            entry[key] = torch.zeros([size + 3 for size in self.named()[name].shape])
        elif damage == "foreign" and here:
            entry["exp_avg" if key == "momentum_buffer" else "momentum_buffer"] = entry.pop(key)
        elif damage == "missing":
            del entry[key]
        elif damage == "all missing":
            state["state"].pop(index, None)
        elif damage == "wider":
            entry[key] = entry[key].double()
        elif damage == "older":
            for group in state["param_groups"]:
                group.pop("form", None)
                group.pop("cautious_decay", None)
        elif damage == "unnamed":
            for group in state["param_groups"]:
                del group["param_names"], group["param_shapes"]
        try:
            self.optimizer.load_state_dict(state)
        except ValueError:
            # An entry without one of its tensors may count as another algorithm's.
            if refused or damage == "missing":
                raise
            raise AssertionError(f"load_damaged({damage}) was refused") from None
        assert not refused, f"load_damaged({damage}): loaded state that does not fit {name}"
        self._take_over(self.optimizer)

    def copied(self, way: str) -> None:
        """Goes on with a copy of model and optimizer; plain tensors only."""
        if not self.is_reference:
            return
        self.spoiled = self.sent_early
        gradients = {name: parameter.grad for name, parameter in self.named().items()}
        kept = self.model, self.optimizer, self.replaced
        was_early = self.sent_early, self.spoiled
        copied = copy.deepcopy(kept) if way == "deepcopy" else pickle.loads(pickle.dumps(kept))
        self.model, optimizer, self.replaced = copied
        self.modules = self.model["blocks"]
        self._take_over(optimizer)
        self.sent_early, self.spoiled = was_early
        for name, parameter in self.named().items():
            parameter.grad = gradients[name]

    def masters(self, on: bool) -> None:
        state = copy.deepcopy(self.optimizer.state_dict())
        if not on:
            for entry in state["state"].values():
                entry.pop("master", None)
        self.has_masters = on
        optimizer = self._build()
        optimizer.load_state_dict(state)
        self._take_over(optimizer)

    # --- state, dtypes, groups, layouts ------------------------------------------------------

    def clear_state(self) -> None:
        self.spoiled = self.sent_early
        self.optimizer.state.clear()

    def drop_state(self, seed: int, share: float) -> None:
        self.spoiled = self.sent_early
        for name in self._chosen(seed, share):
            self.optimizer.state.pop(self.named()[name], None)

    def cast(self, dtype: str) -> None:
        if self.take != self.optimizer.step:
            # The compiler holds weak references to parameters; torch then casts no DTensor.
            return
        self.spoiled = self.sent_early
        self.model.to(DTYPES[dtype])

    def add_group(self, block: Block, seed: int) -> None:
        number = len(self.blocks)
        self._add_block(block, seed)
        self._spread(self.layout, [self.modules[number]])
        self.optimizer.add_param_group(self._group(number))

    def replace(self, layout: Layout, keeps_gradients: bool) -> None:
        """Other parameters with the same weights, in another layout, take the places of the old ones in the groups."""
        self.spoiled = self.sent_early
        old = self.named()
        self.modules = nn.ModuleList(nn.Module() for _ in self.blocks)
        self.model = nn.ModuleDict({"blocks": self.modules})
        for name, parameter in old.items():
            _, number, own_name = name.split(".")
            new = nn.Parameter(whole(parameter), requires_grad=parameter.requires_grad)
            self.modules[int(number)].register_parameter(own_name, new)
        self._spread(layout)
        new_by_name = dict(self.model.named_parameters())
        for group in self.optimizer.param_groups:
            group["params"] = [new_by_name[name] for name in group["param_names"]]
        # A replacement that was noticed has state of its own; one that was not has none.
        owner = {name: old[name] if old[name] in self.optimizer.state else self.replaced.get(old[name], old[name]) for name in old}
        self.replaced = {new: owner[name] for name, new in self.named().items()}
        self.absent = {}
        self.num_layouts += 1

    def compile(self) -> None:
        self.take = torch.compile(self.optimizer.step, backend="eager")

    @torch.no_grad()
    def write_on_one_rank(self, rank: int) -> None:
        """Never drawn: a fault, to see that it is reported."""
        if self.world_size is not None and dist.get_rank() == rank:
            for parameter in self.named().values():
                (parameter.to_local() if isinstance(parameter, DTensor) else parameter).add_(1)

    def check_replicas(self) -> None:
        self.optimizer.check_replicas()  # type: ignore[attr-defined]


def tensors_of(machine: Machine) -> Iterator[tuple[str, Tensor]]:
    """Weights, state and gradients by name."""
    for name, parameter in machine.named().items():
        yield name, parameter.detach()
        for key, value in machine.state_of(parameter).items():
            yield f"{name}.{key}", value
        if parameter.grad is not None:
            yield f"{name}.grad", parameter.grad
