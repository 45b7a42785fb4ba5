"""Hashes of whole weights and whole state after a few steps with fixed gradients: a step's bits.

    python tests/distributed/step_bits.py              # {case: hash}, to stdout
    python tests/distributed/step_bits.py --out FILE   # the same, to a file
    python tests/distributed/step_bits.py --each       # a hash for every tensor of every case
    python tests/distributed/step_bits.py --store      # into step_bits.json, for this machine

Two versions of the code have the same bits where these are the same. A case is a preset on a
layout; some have options that change no bit, some have groups with bits of their own. Bits depend
on the machine too (see ``machine``), so step_bits.json has them by machine.
"""

import argparse
import copy
import hashlib
import json
import logging
import platform
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from ranks import run_ranks
from references import set_gradient, sharded, whole, whole_tensors
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from omn_dist import PRESETS, DualOptimizer, build_parameter_groups

STORED = Path(__file__).with_suffix(".json")
COMMAND = "python tests/distributed/step_bits.py --store"
NUM_STEPS = 5
SECONDS = 300

# --- parameters -----------------------------------------------------------------------------------

MATRICES = (
    (16, 16),
    (10, 3),
    (3, 8),
    (1, 16),
    (33, 8),
    (2, 24),
    (64, 96),
    # The kernels of bf16 products take even sides from 128 on.
    (128, 130),
    (194, 128),
    (131, 150),
)
Group = tuple[tuple[tuple[int, ...], ...], dict[str, Any]]
"""Shapes of parameters, and the fields of their group."""

GATED = {"muon_split_algorithms": ("muon", "adamw"), "adamw_lr": 0.003, "adamw_weight_decay": 0.05}
USUAL: tuple[Group, ...] = (
    (MATRICES, {"algorithm": "muon"}),
    (((12, 20), (20, 12)), {"algorithm": "muon", "lr": 0.03, "weight_decay": 0.2}),
    # A stack of experts, a convolution, and fused projections.
    (((5, 4, 6),), {"algorithm": "muon", "muon_shape": (5, 4, 6)}),
    (((6, 4, 3, 3),), {"algorithm": "muon", "muon_shape": (6, 36)}),
    (
        ((24, 8), (24, 8)),
        {
            "algorithm": "muon",
            "muon_shape": (3, 8, 8),
            "muon_split_sizes": (4, 2, 2),
            "muon_split_names": ("q", "k", "v"),
            "muon_joined_axes": (0,),
        },
    ),
    # Rows on AdamW, at the end, between heads, and as columns of what is stored.
    (((20, 14),), {"algorithm": "muon", "muon_split_sizes": (13, 7), **GATED}),
    (
        ((32, 6),),
        {"algorithm": "muon", "muon_shape": (2, 16, 6), "muon_split_sizes": (11, 5), **GATED},
    ),
    (
        ((8, 24),),
        {
            "algorithm": "muon",
            "muon_shape": (3, 8, 8),
            "muon_split_sizes": (4, 4),
            "muon_transposed": True,
            **GATED,
        },
    ),
    (((8, 20),), {"algorithm": "muon", "muon_shape": (20, 8), "muon_transposed": True}),
    (((128, 140),), {"algorithm": "muon", "muon_shape": (140, 128), "muon_transposed": True}),
    (((37,), (3,)), {"algorithm": "vector"}),
    (((24,),), {"algorithm": "vector", "segments": ((0, 5), (5, 16, 0.5), (16, 24, 2.0, False))}),
    (((7,), (1,), (9, 5), (1, 11), (2, 3, 5), (67, 33)), {"algorithm": "adamw"}),
    (((19,), (6, 3)), {"algorithm": "adamw", "lr": 0.01, "weight_decay": 0.3, "betas": (0.8, 0.9)}),
)
_COMMON = {"algorithm": "muon", "weight_decay": 0.1}
_FIELDS: tuple[dict[str, Any], ...] = (
    {"newton_schulz": "torch"},
    {"newton_schulz": "omn", "form": "gram"},
    {"newton_schulz": "omn", "form": "auto"},
    {"newton_schulz": "scaled", "ns_dtype": "float32", "schedule": "polar_express"},
    {"schedule": "cubic", "ns_steps": 7},
    {"spectral_cap": 0.5},
    {"stable_rank_floor": 8.0},
    {"cautious_decay": True, "nesterov": False},
    {"momentum_rule": "ema", "momentum": 0.5, "scale": "0.2*sqrt(max(m, n))"},
    {"algorithm": "normuon", "row_beta": 0.8, "rescale": "|O|/|O^|"},
    {"algorithm": "normuon", "cautious_decay": True, "spectral_cap": 0.7},
)
FIELDS: tuple[Group, ...] = (
    *((((24, 10), (10, 24), (130, 128)), {**_COMMON, **fields}) for fields in _FIELDS),
    (((24,), (5,)), {**_COMMON, "algorithm": "vector", "cautious_decay": True}),
)
SETS = {"usual": USUAL, "fields": FIELDS}


class _Model(nn.Module):
    """Matrices, some of them large enough for the kernels, and parameters for AdamW."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 20)
        self.layers = nn.ModuleList(nn.Linear(20, 20) for _ in range(4))
        self.norm = nn.LayerNorm(20)
        self.up, self.down = nn.Linear(20, 136, bias=False), nn.Linear(136, 20, bias=False)
        self.wide = nn.Linear(136, 136, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.down(torch.tanh(self.wide(self.up(self.norm(x)))))


# --- layouts and cases ----------------------------------------------------------------------------

ROWS, COLUMNS, COPY = Shard(0), Shard(1), Replicate()
PLAIN = "plain"
LAYOUTS: dict[str, tuple[tuple[int, ...], tuple[Placement, ...]]] = {
    PLAIN: ((), ()),
    "rows of 1": ((1,), (ROWS,)),
    "rows of 2": ((2,), (ROWS,)),
    "rows of 3": ((3,), (ROWS,)),
    "rows of 4": ((4,), (ROWS,)),
    "columns of 2": ((2,), (COLUMNS,)),
    "copies of rows (2, 2)": ((2, 2), (COPY, ROWS)),
    "column-parallel (2, 2)": ((2, 2), (_StridedShard(0, split_factor=2), ROWS)),
    "row-parallel (2, 2)": ((2, 2), (ROWS, COLUMNS)),
}
KINDS = ("omn", "torch", "normuon")
"""A preset with an iteration in fp32, one in bf16, and one with numbers of rows."""


@dataclass(frozen=True)
class Case:
    """Some steps of one optimizer on one layout."""

    preset: str
    layout: str
    what: str = "usual"
    """Parameters and groups: a name of ``SETS``, or ``model``."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of the optimizer."""
    dtype: torch.dtype = torch.float32
    way: str = ""
    """What is done otherwise: ``overlap_backward``, or ``reloaded``."""
    reference: str | None = None
    """The case that has the same bits, by its name."""

    @property
    def name(self) -> str:
        options = [f"{name}={value}" for name, value in self.options.items() if name != "teams"]
        options += ["teams"] if "teams" in self.options else []
        dtype = [] if self.dtype == torch.float32 else [str(self.dtype).removeprefix("torch.")]
        parts = (self.preset, self.layout, self.what, *dtype, *options, self.way)
        return ", ".join(part for part in parts if part)

    @property
    def world_size(self) -> int:
        """Ranks; 1 for plain tensors too."""
        return torch.Size(LAYOUTS[self.layout][0]).numel()


def cases() -> list[Case]:
    """All cases."""
    found: list[Case] = []

    def add(
        preset: str,
        layouts: Sequence[str],
        *,
        reference: Case | None = None,
        **fields: Any,
    ) -> None:
        """A case on each layout, with the bits of ``reference``, or of one on plain tensors."""
        if reference is None:
            reference = Case(preset, PLAIN, **fields)
            found.append(reference)
        found.extend(Case(preset, layout, **fields, reference=reference.name) for layout in layouts)

    for preset in PRESETS:
        add(preset, [layout for layout in LAYOUTS if layout != PLAIN])
    for preset in KINDS:
        plain = Case(preset, PLAIN)
        add(preset, ["rows of 3"], reference=plain, options={"wave_bytes": 64})
        add(preset, ["rows of 2"], reference=plain, options={"transport": "all_gather"})
        add(preset, ["rows of 2"], reference=plain, way="reloaded")
        add(preset, ["copies of rows (2, 2)"], reference=plain, options={"copies": "repeat"})
        add(preset, ["rows of 3"], dtype=torch.bfloat16, options={"master_weights": True})
        model = Case(preset, PLAIN, what="model")
        add(preset, ["rows of 2"], what="model")
        layouts = ["rows of 2", "copies of rows (2, 2)"]
        add(preset, layouts, reference=model, what="model", way="overlap_backward")
    add("torch", ["rows of 3"], dtype=torch.bfloat16)
    add("omn", ["rows of 3", "column-parallel (2, 2)"], what="fields")
    add("omn", ["rows of 3"], options={"communication_dtype": "bfloat16"})
    # Bits of their own, which depend on owners.
    teams = {"usual.0.7": (0, 1), "usual.0.8": (0, 1, 2, 3), "usual.0.4": (1, 2)}
    for preset in ("omn", "torch"):
        found.append(Case(preset, "rows of 4", options={"teams": teams}))
        found.append(Case(preset, "rows of 3", options={"batch_invariant": False}))
    return found


# --- steps on the ranks ---------------------------------------------------------------------------


def _placements(layout: str, num_dims: int) -> tuple[Placement, ...]:
    """Those of a layout for one parameter.

    A vector has no columns: it is copied along that axis of two, and sharded along one alone.
    """
    _, placements = LAYOUTS[layout]
    if num_dims > 1:
        return placements
    instead = COPY if len(placements) > 1 else ROWS
    return tuple(instead if placement == COLUMNS else placement for placement in placements)


def _built(case: Case, mesh: DeviceMesh | None) -> tuple[dict[str, nn.Parameter], DualOptimizer]:
    """Parameters by name, and the optimizer."""
    parameters: dict[str, nn.Parameter] = {}
    groups = []
    for number, (shapes, fields) in enumerate(SETS[case.what]):
        names = [f"{case.what}.{number}.{index}" for index in range(len(shapes))]
        for name, tensor in zip(names, whole_tensors(shapes, number), strict=True):
            placements = _placements(case.layout, tensor.ndim)
            parameters[name] = sharded(tensor.to(case.dtype), mesh, placements)
        members = [parameters[name] for name in names]
        groups.append({**fields, "params": members, "param_names": names})
    return parameters, DualOptimizer(groups, preset=case.preset, **case.options)


def _is_missing(step: int, number: int, parameter: Tensor) -> bool:
    """Whether a parameter has no gradient: every third in one step, all but vectors in another."""
    return (step == 1 and number % 3 == 0) or (step == 3 and parameter.ndim > 1)


def _set_gradients(parameters: Mapping[str, nn.Parameter], step: int) -> None:
    shapes = [tuple(parameter.shape) for parameter in parameters.values()]
    gradients = whole_tensors(shapes, 100 + step)
    pairs = zip(parameters.values(), gradients, strict=True)
    for number, (parameter, gradient) in enumerate(pairs):
        if not _is_missing(step, number, parameter):
            # Of several magnitudes, and nothing but zeros for some at first.
            factor = 10.0 ** -(step % 3) if step or number % 5 else 0.0
            set_gradient(parameter, (gradient * factor).to(parameter.dtype))


def _model(
    case: Case,
    mesh: DeviceMesh | None,
) -> tuple[dict[str, nn.Parameter], DualOptimizer, nn.Module]:
    """Parameters by name, the optimizer, and the model."""
    model = _Model()
    with torch.no_grad():
        tensors = whole_tensors([tuple(parameter.shape) for parameter in model.parameters()], 0)
        for parameter, tensor in zip(model.parameters(), tensors, strict=True):
            parameter.copy_(tensor / 4)
    if mesh is not None:
        for layer in (*model.layers, model.up, model.wide, model.down):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    groups = build_parameter_groups(model, weight_decay=0.1)
    # In waves so small that directions leave in several parts.
    optimizer = DualOptimizer(groups, preset=case.preset, wave_bytes=2000, **case.options)
    return dict(model.named_parameters()), optimizer, model


def _tensors(case: Case, meshes: Mapping[tuple[int, ...], DeviceMesh | None]) -> dict[str, Tensor]:
    """Whole weights and state after the last step, by parameter and key."""
    mesh = meshes[LAYOUTS[case.layout][0]]
    model = None
    if case.what == "model":
        parameters, optimizer, model = _model(case, mesh)
    else:
        parameters, optimizer = _built(case, mesh)
    for step in range(NUM_STEPS):
        if model is None:
            _set_gradients(parameters, step)
        else:
            # The same on all ranks, whose mean is exact where they are 2 or 4.
            generator = torch.Generator().manual_seed(step)
            tokens = torch.randint(11, (2, 3), generator=generator)
            with optimizer.overlap_backward() if case.way == "overlap_backward" else nullcontext():
                model(tokens).square().mean().backward()
        for group in optimizer.param_groups:
            group["lr"] *= 0.75
        optimizer.step()
        optimizer.zero_grad()
        if case.way == "reloaded" and step == 2:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    found = {}
    for name, parameter in parameters.items():
        found[f"{name}: weight"] = whole(parameter)
        for key, value in optimizer.state[parameter].items():
            found[f"{name}: {KEYS.get(key, key)}"] = whole(value)
    return found


KEYS = {"row_moment": "row_second_moment"}
"""Names that keys of the state have had, and those that they are hashed under."""


def _hash(tensor: Tensor) -> str:
    """Of dtype, shape and bits."""
    described = f"{tensor.dtype} {tuple(tensor.shape)} ".encode()
    bits = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(described + bits).hexdigest()


def _on_ranks(some: Sequence[Case]) -> dict[str, dict[str, str]]:
    """Hashes by case and tensor, as this rank finds them."""
    # Of plain tensors on ranks, of parameters in bf16, and of how torch gathers strided shards.
    warnings.simplefilter("ignore")
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    found = {}
    meshes: dict[tuple[int, ...], DeviceMesh | None] = {(): None}
    for shape in (LAYOUTS[case.layout][0] for case in some):
        if shape not in meshes:
            names = ("outer", "inner")[-len(shape) :]
            meshes[shape] = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for case in some:
        found[case.name] = {name: _hash(tensor) for name, tensor in _tensors(case, meshes).items()}
    return found


# --- hashes ---------------------------------------------------------------------------------------


def hashes_of_tensors(some: Sequence[Case]) -> dict[str, dict[str, str]]:
    """The hash of every whole tensor of every case, by the names of both; the same on all ranks."""
    found: dict[str, dict[str, str]] = {}
    for world_size in sorted({case.world_size for case in some}):
        there = [case for case in some if case.world_size == world_size]
        first, *others = run_ranks(world_size, _on_ranks, there, seconds=SECONDS)
        for name, tensors in first.items():
            assert all(other[name] == tensors for other in others), f"{name}: ranks have other bits"
        found |= first
    return {case.name: found[case.name] for case in some}


def hashes_of_cases(tensors: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """One hash for the weights and one for the state of every case."""
    found = {}
    for name, hashes in tensors.items():
        parts: dict[str, list[str]] = {"weights": [], "state": []}
        for tensor in sorted(hashes):
            part = "weights" if tensor.endswith(": weight") else "state"
            parts[part].append(f"{tensor} {hashes[tensor]}\n")
        for part, lines in parts.items():
            found[f"{name}: {part}"] = hashlib.sha256("".join(lines).encode()).hexdigest()
    return found


def machine() -> str:
    """What bits depend on beside the code, in one line: the version of torch, and the CPU."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().partition("\n\n")[0].splitlines() if cpuinfo.exists() else []
    parts = (line.partition(":") for line in lines)
    fields = {key.strip(): value.strip() for key, _, value in parts}
    cpu = [fields.get("vendor_id", platform.machine())]
    cpu += [f"{key} {fields[key]}" for key in ("cpu family", "model") if key in fields]
    flags = fields.get("flags", "").split()
    has = [flag if flag in flags else f"no {flag}" for flag in ("avx512_bf16", "amx_bf16")]
    capability = torch.backends.cpu.get_cpu_capability()
    return ", ".join((f"torch {torch.__version__}", capability, " ".join(cpu), *has))


def stored() -> dict[str, dict[str, str]]:
    """The hashes of step_bits.json by machine and case."""
    return json.loads(STORED.read_text()) if STORED.exists() else {}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Hashes of weights and state after a few steps.")
    parser.add_argument("--out", type=Path, help="file for the JSON, instead of stdout")
    parser.add_argument("--each", action="store_true", help="one hash for every tensor")
    parser.add_argument("--store", action="store_true", help="into step_bits.json")
    given = parser.parse_args()
    tensors = hashes_of_tensors(cases())
    if given.store:
        by_machine = {**stored(), machine(): hashes_of_cases(tensors)}
        STORED.write_text(json.dumps(by_machine, indent=1, sort_keys=True) + "\n")
        print(f"stored for {machine()}")
        return
    text = json.dumps(tensors if given.each else hashes_of_cases(tensors), indent=1)
    if given.out is None:
        print(text)
    else:
        given.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
