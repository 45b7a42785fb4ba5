"""A random program: a model, a layout, and what somebody's training script does with the optimizer. Drawn from a seed.

Everything random is in the program, as values that can be printed: ranks and the reference then do the same.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, NamedTuple

import torch

from omn_dist.optim.presets import PRESETS

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
EVERY_PARAMETER = 1.0


@dataclass(frozen=True)
class Block:
    """A module whose parameters are one group of the optimizer."""

    algorithm: str
    shapes: tuple[tuple[int, ...], ...]
    dtype: str
    fields: Mapping[str, Any]


@dataclass(frozen=True)
class Layout:
    """How a model is spread over all ranks."""

    kind: str
    """``fsdp``: torch's fully_shard; ``tensors``: DTensors with random placements."""
    mesh: str
    """``flat`` (W,), ``one_copy`` (1, W), ``copies`` (W, 1)."""
    seed: int = 0
    """Of the placements."""

    def mesh_shape(self, world_size: int) -> tuple[int, ...]:
        return {"flat": (world_size,), "one_copy": (1, world_size), "copies": (world_size, 1)}[self.mesh]


class Operation(NamedTuple):
    name: str
    arguments: Mapping[str, Any]

    def __str__(self) -> str:
        return f"{self.name}({', '.join(f'{name}={value!r}' for name, value in self.arguments.items())})"


@dataclass(frozen=True)
class Program:
    """One program: it runs the same on any number of ranks."""

    seed: int
    blocks: tuple[Block, ...]
    options: Mapping[str, Any]
    layout: Layout | None
    """At the start; ``None``: plain tensors, which an operation may shard later."""
    shares_copies: bool
    """Whether ranks with plain tensors share the work (``process_group``)."""
    operations: tuple[Operation, ...]

    @property
    def is_published(self) -> bool:
        """Whether torch.optim.Muon and torch.optim.AdamW do the same steps."""
        return (
            self.options["preset"] == "torch"
            and not self.options["master_weights"]
            and all(block.algorithm in ("muon", "adamw") and block.fields.keys() <= {"lr", "weight_decay"} for block in self.blocks)
        )

    def __str__(self) -> str:
        lines = [f"program of seed {self.seed}"]
        lines += [f"  block {number}: {block}" for number, block in enumerate(self.blocks)]
        lines += [f"  options: {dict(self.options)}", f"  layout: {self.layout}, shares_copies={self.shares_copies}"]
        lines += [f"  {number:2}. {operation}" for number, operation in enumerate(self.operations)]
        return "\n".join(lines)


# --- the model -----------------------------------------------------------------------------------


def _size(random: Random, smallest: int) -> int:
    return random.choice((smallest, 1, 2, 3, 5, 8, 17, 24, random.randint(4, 24), random.choice((33, 64, 129))))


def _fields(random: Random, algorithm: str) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if random.random() < 0.7:
        fields |= {"lr": random.choice((0.01, 0.1)), "weight_decay": random.choice((0.0, 0.1))}
    if algorithm in ("muon", "normuon"):
        choices: dict[str, Sequence[Any]] = {
            "schedule": ("quintic", "cubic", "polar_express"),
            "nesterov": (False, True),
            "momentum_rule": ("sum", "ema"),
            "cautious_decay": (True,),
            "spectral_cap": (0.5,),
            "stable_rank_floor": (1.5,),
            "ns_dtype": ("float32", "bfloat16"),
        }
        fields |= {field: random.choice(values) for field, values in choices.items() if random.random() < 0.08}
    return fields


def _view(random: Random) -> tuple[dict[str, Any], tuple[int, ...]]:
    """Fields of a view, and the shape that a parameter with it is stored in."""
    count, num_rows, num_columns = random.randint(1, 4), random.randint(2, 9), random.randint(1, 12)
    fields: dict[str, Any] = {"muon_shape": (count, num_rows, num_columns)}
    if random.random() < 0.5:
        first = random.randint(1, num_rows - 1)
        fields["muon_split_sizes"] = (first, num_rows - first)
        fields["muon_split_algorithms"] = random.choice((("muon", "adamw"), ("adamw", "muon"), ("muon", "muon")))
    if random.random() < 0.3:
        fields["muon_joined_axes"] = (0,)
    if random.random() < 0.3:
        return fields | {"muon_transposed": True}, (num_columns, count * num_rows)
    return fields, random.choice(((count * num_rows, num_columns), (count, num_rows, num_columns)))


def _block(random: Random, *, published: bool, dtype: str, smallest: int) -> Block:
    algorithm = random.choice(("muon", "muon", "adamw") if published else ("muon", "muon", "normuon", "vector", "adamw"))
    fields = _fields(random, "" if published else algorithm)
    stored = None
    if algorithm in ("muon", "normuon") and not published and random.random() < 0.3:
        view, stored = _view(random)
        fields |= view
    num_dims = {"vector": (1,), "adamw": (1, 1, 2, 3)}.get(algorithm, (2,))
    shapes = tuple(
        stored or tuple(_size(random, smallest) for _ in range(random.choice(num_dims))) for _ in range(random.randint(1, 3))
    )
    return Block(algorithm, shapes, dtype, fields)


def _layout(random: Random, *, wrapped: bool) -> Layout:
    kind = random.choice(("fsdp", "tensors")) if wrapped else "tensors"
    return Layout(kind, random.choice(("flat", "flat", "one_copy", "copies")), random.randrange(1000))


# --- operations ----------------------------------------------------------------------------------


class Draw(NamedTuple):
    """What an operation may ask while it is drawn."""

    random: Random
    published: bool
    smallest: int
    wrapped: bool
    mixed: bool

    def seed(self) -> int:
        return self.random.randrange(10**6)

    def share(self) -> float:
        """Of the parameters that an operation reaches."""
        return self.random.choice((EVERY_PARAMETER, EVERY_PARAMETER, 0.5, 0.2))

    def dtype(self) -> str:
        return "bfloat16" if self.mixed and self.random.random() < 0.3 else "float32"


def _backward(draw: Draw) -> dict[str, Any]:
    return {
        "seed": draw.seed(),
        "share": draw.random.choice((EVERY_PARAMETER,) * 4 + (0.5, 0.0)),
        "scale": draw.random.choice((1.0, 1.0, 1e-3, 1e3)),
        "early": draw.random.random() < 0.3,
    }


def _set(draw: Draw) -> dict[str, Any]:
    values: dict[str, Sequence[Any]] = {
        "lr": (0.0, 0.003, 0.05, "tensor"),
        "weight_decay": (0.0, 0.2),
        "momentum": (0.0, 0.5, 0.95),
    }
    field = draw.random.choice(sorted(values))
    return {"field": field, "value": draw.random.choice(values[field]), "seed": draw.seed(), "share": draw.share()}


DRAWN: Mapping[str, tuple[float, Callable[[Draw], dict[str, Any]]]] = {
    # What every training loop does.
    "backward": (6, _backward),
    "step": (6, lambda draw: {}),
    "step_closure": (0.5, lambda draw: {"seed": draw.seed(), "scale": draw.random.choice((1.0, 1e-3))}),
    "zero_grad": (2, lambda draw: {"set_to_none": draw.random.random() < 0.6}),
    "drop_gradients": (
        1.5,
        lambda draw: {"seed": draw.seed(), "share": draw.share(), "on": draw.random.choice(("every rank", "one part"))},
    ),
    "clip": (1, lambda draw: {"value": draw.random.choice((0.1, 1.0))}),
    "odd_gradients": (0.7, lambda draw: {"seed": draw.seed(), "memory": draw.random.choice(("columns", "gaps", "negative"))}),
    "set": (1.5, _set),
    "read": (1, lambda draw: {"what": draw.random.choice(("repr", "state_dict", "plans", "by_name"))}),
    "freeze": (0.7, lambda draw: {"seed": draw.seed(), "share": draw.share()}),
    "unfreeze": (0.7, lambda draw: {}),
    # Others write weights.
    "write": (
        1.5,
        lambda draw: {
            "seed": draw.seed(),
            "share": draw.share(),
            "way": draw.random.choice(("copy", "data", "scale", "rows", "average")),
        },
    ),
    "swap_and_back": (0.7, lambda draw: {"seed": draw.seed(), "reads": draw.random.random() < 0.5}),
    # Checkpoints.
    "save": (1.5, lambda draw: {"how": draw.random.choice(("live", "copy", "whole", "torch_full", "torch_sharded", "torch_flat"))}),
    "load": (1.5, lambda draw: {"into": draw.random.choice(("self", "fresh"))}),
    "load_damaged": (
        1,
        lambda draw: {
            "seed": draw.seed(),
            "damage": draw.random.choice(("shape", "missing", "all missing", "foreign", "older", "wider", "unnamed")),
            "on": draw.random.choice(("every rank", "one rank")),
        },
    ),
    "copied": (0.7, lambda draw: {"way": draw.random.choice(("deepcopy", "pickle"))}),
    "masters": (0.5, lambda draw: {"on": draw.random.random() < 0.7}),
    # State that went missing, dtypes, groups, layouts.
    "clear_state": (0.4, lambda draw: {}),
    "drop_state": (0.4, lambda draw: {"seed": draw.seed(), "share": draw.share()}),
    "cast": (0.7, lambda draw: {"dtype": draw.random.choice(("bfloat16", "float32"))}),
    "add_group": (
        0.7,
        lambda draw: {
            "block": _block(draw.random, published=draw.published, dtype=draw.dtype(), smallest=draw.smallest),
            "seed": draw.seed(),
        },
    ),
    "replace": (0.7, lambda draw: {"layout": _layout(draw.random, wrapped=draw.wrapped), "keeps_gradients": False}),
    "compile": (0.1, lambda draw: {}),
    "check_replicas": (0.3, lambda draw: {}),
}
"""By name: how often an operation is drawn, and its arguments."""

OPERATIONS: tuple[str, ...] = tuple(DRAWN)
"""The operations that programs are made of when nothing else is said."""


def draw_program(seed: int, operations: Sequence[str] = OPERATIONS) -> Program:
    """The program of a seed, made of these operations."""
    random = Random(f"program {seed}")
    published = random.random() < 0.3
    smallest = 0 if random.random() < 0.2 else 1
    draw = Draw(random, published, smallest, wrapped=smallest > 0, mixed=not published and random.random() < 0.4)
    blocks = tuple(_block(random, published=published, dtype=draw.dtype(), smallest=smallest) for _ in range(random.randint(1, 3)))
    options: dict[str, Any] = {
        "preset": "torch" if published else random.choice(sorted(PRESETS)),
        "wave_bytes": random.choice((None, 64, 300, 2000)),
        "transport": random.choice(("all_to_all", "all_to_all", "all_to_all", "all_gather")),
        "copies": random.choice(("share", "repeat")),
        "communication_dtype": "auto" if published else random.choice(("auto", "float32", "bfloat16")),
        "master_weights": draw.mixed and random.random() < 0.6,
    }
    starts_plain = "replace" in operations and random.random() < 0.3
    layout = None if starts_plain else _layout(random, wrapped=draw.wrapped)
    shares_copies = layout is None and random.random() < 0.3
    return Program(seed, blocks, options, layout, shares_copies, tuple(_operations(draw, operations)))


def _operations(draw: Draw, names: Sequence[str]) -> Iterator[Operation]:
    weights = [DRAWN[name][0] for name in names]
    for _ in range(draw.random.randint(3, 11)):
        (name,) = draw.random.choices(names, weights)
        yield Operation(name, DRAWN[name][1](draw))
        if draw.random.random() < 0.4:
            yield Operation("backward", _backward(draw))
            yield Operation("step", {})
    yield Operation("backward", _backward(draw))
    yield Operation("step", {})
