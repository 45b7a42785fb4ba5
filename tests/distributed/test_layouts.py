"""Every DTensor layout that FSDP2 and its companions make, bitwise one process, with the plan's collectives and bytes."""

import functools
import itertools
import time
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from references import OMNReference, is_shard_of, local_of, set_gradient, sharded, whole, whole_tensors
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from omn_dist import DualOptimizer, build_parameter_groups
from omn_dist.exchange.route import wave_route
from omn_dist.plan import Matrix, plan_matrices
from omn_dist.plan.geometry.matrix import Work
from omn_dist.plan.geometry.placement import parameter_layout

# Stacks of 5 and of 8 experts, and a projection of 3 heads; the rest are matrices themselves.
VIEWS = {(5, 4, 6): (5, 4, 6), (8, 4, 6): (8, 4, 6), (12, 10): (3, 4, 10)}
SHAPES = ((20, 10), (10, 20), (6, 20), (20, 6), (10, 10), (3, 8), (1, 16), (16, 1), *VIEWS)
NAMES = [f"m{index:02}" for index in range(len(SHAPES))]
NUM_STEPS = 3

ROWS, COLUMNS, COPY = Shard(0), Shard(1), Replicate()


def _strided(factor: int) -> _StridedShard:
    return _StridedShard(0, split_factor=factor)


LAYOUTS: dict[str, tuple[tuple[int, ...], tuple[Placement, ...]]] = {
    "rows of 1": ((1,), (ROWS,)),
    "columns of 2": ((2,), (COLUMNS,)),
    "rows of 3": ((3,), (ROWS,)),
    "columns of 4": ((4,), (COLUMNS,)),
    "copies of 3": ((3,), (COPY,)),
    "copies of rows (2, 2)": ((2, 2), (COPY, ROWS)),
    "rows of copies (2, 2)": ((2, 2), (ROWS, COPY)),
    "column-parallel (2, 2)": ((2, 2), (_strided(2), ROWS)),
    "row-parallel (2, 2)": ((2, 2), (ROWS, COLUMNS)),
    "rows of rows (2, 2)": ((2, 2), (ROWS, ROWS)),
    "copies of rows (2, 3)": ((2, 3), (COPY, ROWS)),
    "column-parallel (3, 2)": ((3, 2), (_strided(2), ROWS)),
    "row-parallel (2, 3)": ((2, 3), (ROWS, COLUMNS)),
    "copies, column-parallel (2, 2, 2)": ((2, 2, 2), (COPY, _strided(2), ROWS)),
    "copies, row-parallel (2, 2, 2)": ((2, 2, 2), (COPY, ROWS, COLUMNS)),
    "rows of 8": ((8,), (ROWS,)),
}


def _apart(stored: Sequence[Tensor]) -> dict[str, Tensor]:
    """Every matrix as a tensor of its own."""
    found = {}
    for name, tensor in zip(NAMES, stored, strict=True):
        view = VIEWS.get(tuple(tensor.shape))
        parts = [tensor] if view is None else tensor.view(view).unbind()
        found.update({f"{name}.{index}": part.clone() for index, part in enumerate(parts)})
    return found


@functools.cache
def _expected(preset: str) -> list[Tensor]:
    """Whole stored parameters after the last step, from matrices apart in this process."""
    weights = _apart(whole_tensors(SHAPES, 0))
    gradients = [_apart(whole_tensors(SHAPES, 100 + step)) for step in range(NUM_STEPS)]
    if preset == "omn":
        reference = OMNReference(weights)
        for gradient in gradients:
            reference.step(gradient)
        weights = reference.weights
    else:
        parameters = {name: nn.Parameter(weight) for name, weight in weights.items()}
        optimizer: torch.optim.Optimizer
        if preset == "torch":
            optimizer = torch.optim.Muon(parameters.values(), weight_decay=0.1)
        else:
            optimizer = DualOptimizer([{"params": list(parameters.values()), "algorithm": "muon"}], preset=preset)
        for gradient in gradients:
            for name, parameter in parameters.items():
                parameter.grad = gradient[name]
            optimizer.step()
        weights = {name: parameter.detach() for name, parameter in parameters.items()}
    return [
        torch.stack([weight for name, weight in weights.items() if name.startswith(f"{stored}.")]).view(shape)
        for stored, shape in zip(NAMES, SHAPES, strict=True)
    ]


def _groups(parameters: Sequence[nn.Parameter], omitted: Sequence[tuple[int, ...]] = ()) -> list[dict[str, Any]]:
    groups: dict[tuple[int, ...] | None, dict[str, Any]] = {}
    for name, parameter in zip(NAMES, parameters, strict=True):
        if tuple(parameter.shape) in omitted:
            continue
        view = VIEWS.get(tuple(parameter.shape))
        group = groups.setdefault(view, {"params": [], "param_names": [], "algorithm": "muon"})
        group["params"].append(parameter)
        group["param_names"].append(name)
        if view is not None:
            group["muon_shape"] = view
    return list(groups.values())


def _check(optimizer: DualOptimizer, parameters: Sequence[nn.Parameter], preset: str, rank: int | None = None) -> None:
    """Steps with whole gradients; weights bitwise the reference, nothing gathered whole, and traffic as planned.

    ``rank`` is this rank's number in the plan, where that is not the one in the whole group.
    """
    (plan,) = optimizer.plans
    rank = dist.get_rank() if rank is None else rank
    with mock.patch.object(DTensor, "full_tensor", side_effect=AssertionError("full_tensor was called")):
        _check_weights(optimizer, parameters, preset)
    assert optimizer.bytes_sent == NUM_STEPS * int(plan.bytes_sent_by_rank[rank])
    assert optimizer.num_collectives == NUM_STEPS * plan.num_collectives


def _check_weights(optimizer: DualOptimizer, parameters: Sequence[nn.Parameter], preset: str) -> None:
    """Steps with whole gradients; weights bitwise the reference."""
    for step in range(NUM_STEPS):
        for parameter, gradient in zip(parameters, whole_tensors(SHAPES, 100 + step), strict=True):
            set_gradient(parameter, gradient)
        optimizer.step()
    grouped = {name for group in optimizer.param_groups for name in group["param_names"]}
    for name, parameter, expected in zip(NAMES, parameters, _expected(preset), strict=True):
        assert name not in grouped or is_shard_of(parameter.detach(), expected), name


PRESETS = ("omn", "torch", "normuon")


def _layout(mesh_shape: tuple[int, ...], placements: tuple[Placement, ...]) -> None:
    mesh = init_device_mesh("cpu", mesh_shape)
    columns = torch.Size(size for size, placement in zip(mesh_shape, placements, strict=True) if placement == COLUMNS).numel()
    for preset, wave_bytes in itertools.product(PRESETS, (1, 2**20)):
        # NorMuon refuses shards that have rows but no column: nobody would return the moment of those rows.
        omitted = [shape for shape in SHAPES if preset == "normuon" and columns > 1 and len(shape) == 2 and shape[1] < 8]
        parameters = [sharded(tensor, mesh, placements) for tensor in whole_tensors(SHAPES, 0)]
        optimizer = DualOptimizer(_groups(parameters, omitted), preset=preset, wave_bytes=wave_bytes)
        _check(optimizer, parameters, preset)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_are_bitwise_one_process(layout: str) -> None:
    mesh_shape, placements = LAYOUTS[layout]
    run_ranks(torch.Size(mesh_shape).numel(), _layout, mesh_shape, placements)


def _copies_share_the_work() -> tuple[float, list[bytes]]:
    mesh = init_device_mesh("cpu", (2, 2))
    weights = whole_tensors([(16, 16)] * 8, 0)
    parameters = [sharded(tensor, mesh, (COPY, ROWS)) for tensor in weights]
    optimizer = DualOptimizer([{"params": parameters, "algorithm": "muon"}], preset="omn")
    (plan,) = optimizer.plans
    share = float(plan.flops_by_rank[dist.get_rank()] / plan.flops_by_rank.sum())
    for step in range(3):
        for parameter, gradient in zip(parameters, whole_tensors([(16, 16)] * 8, 1 + step), strict=True):
            set_gradient(parameter, gradient)
        optimizer.step()
    return share, [parameter.detach().to_local().numpy().tobytes() for parameter in parameters]


def test_copies_divide_the_work_and_stay_equal() -> None:
    results = run_ranks(4, _copies_share_the_work)
    assert [share for share, _ in results] == [0.25] * 4
    assert results[0][1] == results[2][1]
    assert results[1][1] == results[3][1]
    assert results[0][1] != results[1][1]


def _copies_repeat_the_work(mesh_shape: tuple[int, ...], placements: tuple[Placement, ...]) -> tuple[int, int]:
    mesh = init_device_mesh("cpu", mesh_shape)
    parameters = [sharded(tensor, mesh, placements) for tensor in whole_tensors(SHAPES, 0)]
    optimizer = DualOptimizer(_groups(parameters), copies="repeat", preset="omn")
    rank = 0
    for size, position, placement in zip(mesh.shape, mesh.get_coordinate() or (), placements, strict=True):
        if placement != COPY:
            rank = rank * size + position
    _check(optimizer, parameters, "omn", rank)
    return optimizer.plans[0].world_size, optimizer.bytes_sent


@pytest.mark.parametrize(
    ("mesh_shape", "placements", "world_size"),
    [((2, 2), (COPY, ROWS), 2), ((2, 2), (ROWS, COPY), 2), ((2,), (COPY,), 1), ((2, 2, 2), (COPY, _strided(2), ROWS), 4)],
)
def test_copies_may_repeat_the_work(mesh_shape: tuple[int, ...], placements: tuple[Placement, ...], world_size: int) -> None:
    results = run_ranks(torch.Size(mesh_shape).numel(), _copies_repeat_the_work, mesh_shape, placements)
    assert {found for found, _ in results} == {world_size}
    assert any(sent for _, sent in results) == (world_size > 1)


def _copies_along_different_axes() -> list[int]:
    mesh = init_device_mesh("cpu", (2, 2))
    placements = ((COPY, ROWS), (ROWS, COPY), (ROWS, ROWS))
    tensors = whole_tensors(SHAPES, 0)
    parameters = [sharded(tensor, mesh, placements[index % 3]) for index, tensor in enumerate(tensors)]
    optimizer = DualOptimizer(_groups(parameters), copies="repeat", preset="omn")
    _check_weights(optimizer, parameters, "omn")
    return [plan.world_size for plan in optimizer.plans]


def test_copies_along_different_axes_may_repeat_the_work() -> None:
    """Each rank is in two pairs, with another rank each: neither pair may wait for the other."""
    assert run_ranks(4, _copies_along_different_axes) == [[4, 2, 2]] * 4


def _cheaper_copies(size: int) -> int:
    mesh = init_device_mesh("cpu", (2, 2))
    parameters = [sharded(tensor, mesh, (COPY, ROWS)) for tensor in whole_tensors([(size, size)] * 4, 0)]
    optimizer = DualOptimizer([{"params": parameters, "algorithm": "muon"}], preset="torch", copies="auto")
    return optimizer.plans[0].world_size


@pytest.mark.parametrize(("size", "world_size"), [(8, 2), (512, 4)])
def test_auto_shares_what_is_worth_sending(size: int, world_size: int) -> None:
    """Tiny matrices cost less to repeat in both copies than one more message; large ones are divided over all four ranks."""
    assert run_ranks(4, _cheaper_copies, size) == [world_size] * 4


def _transposed_numbering() -> None:
    mesh = DeviceMesh("cpu", [[0, 2], [1, 3]])
    parameters = [sharded(tensor, mesh, (ROWS, COLUMNS)) for tensor in whole_tensors(SHAPES, 0)]
    _check(DualOptimizer(_groups(parameters), preset="omn"), parameters, "omn")


def test_a_mesh_that_numbers_its_ranks_otherwise() -> None:
    run_ranks(4, _transposed_numbering)


def _several_meshes() -> None:
    flat, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    layouts: list[tuple[DeviceMesh | None, tuple[Placement, ...]]] = [
        (flat, (ROWS,)),
        (square, (COPY, ROWS)),
        (square["inner"], (ROWS,)),
        (None, ()),
    ]
    parameters = [sharded(tensor, *layouts[index % len(layouts)]) for index, tensor in enumerate(whole_tensors(SHAPES, 0))]
    with pytest.warns(UserWarning, match="matrices are plain tensors"):
        optimizer = DualOptimizer(_groups(parameters), preset="omn")
    # All four ranks, this rank's pair of the inner axis, and this process alone.
    assert [plan.world_size for plan in optimizer.plans] == [4, 2, 1]
    _check_weights(optimizer, parameters, "omn")


def test_several_meshes_and_plain_tensors_in_one_model() -> None:
    run_ranks(4, _several_meshes)


# --- as FSDP2 and its companions build them ---------------------------------------------------------------------------------


class _Network(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(hidden, 2 * hidden, bias=False), nn.Linear(2 * hidden, hidden, bias=False)

        self.use_down = True

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.up(tokens).relu()
        return self.down(hidden) if self.use_down else hidden


def _real(kind: str, hidden: int) -> None:
    torch.manual_seed(0)
    model: Any = _Network(hidden)
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    options: dict[str, Any] = {}
    if kind == "tensor parallel":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
        parallelize_module(model, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(model, mesh=mesh["shard"])
        assert any(isinstance(part, _StridedShard) for part in model.up.weight.placements)
    elif kind == "copies":
        fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    elif kind == "columns":
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)), shard_placement_fn=lambda parameter: Shard(1))
    elif kind == "offload":
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)), offload_policy=CPUOffloadPolicy(pin_memory=False))
    else:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)), mp_policy=policy)
    optimizer = DualOptimizer(build_parameter_groups(model), **{"preset": "omn", **options})
    reference = OMNReference(weights)
    for step in range(2):
        # A real backward, so that gradients come with the placements that FSDP2 gives them; then values that are known.
        model(torch.ones(4, hidden)).float().sum().backward()
        gradients = {}
        for index, (name, parameter) in enumerate(model.named_parameters()):
            assert parameter.grad.placements == parameter.placements
            (gradients[name],) = whole_tensors([tuple(parameter.shape)], 10 * step + index)
            parameter.grad.to_local().copy_(local_of(gradients[name], parameter.device_mesh, parameter.placements))
        optimizer.step()
        optimizer.zero_grad()
        reference.step(gradients)
    for name, parameter in model.named_parameters():
        assert is_shard_of(parameter.detach(), reference.weights[name]), name


@pytest.mark.parametrize(
    ("kind", "hidden", "world_size"),
    [
        ("tensor parallel", 20, 4),
        ("tensor parallel", 10, 4),
        ("tensor parallel", 6, 4),
        ("copies", 10, 4),
        ("columns", 6, 2),
        ("offload", 10, 2),
        ("bf16 compute", 10, 2),
    ],
)
def test_as_fully_shard_builds_them(kind: str, hidden: int, world_size: int) -> None:
    run_ranks(world_size, _real, kind, hidden)


def _unused_on_one_rank() -> None:
    torch.manual_seed(0)
    model: Any = _Network(8)
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    model.set_reduce_scatter_unused_params(True)
    optimizer = DualOptimizer(build_parameter_groups(model), preset="omn")
    reference = OMNReference(weights)
    for step in range(2):
        model.use_down = dist.get_rank() == step
        model(torch.ones(4, 8)).sum().backward()
        reference.step({name: whole(parameter.grad) for name, parameter in model.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
    for name, parameter in model.named_parameters():
        assert is_shard_of(parameter.detach(), reference.weights[name]), name


@pytest.mark.skipif(
    not hasattr(FSDPModule, "set_reduce_scatter_unused_params"), reason="this torch has no set_reduce_scatter_unused_params"
)
def test_parameters_that_one_rank_does_not_use() -> None:
    run_ranks(2, _unused_on_one_rank)


def _distributed_data_parallel() -> None:
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(_Network(8))
    weights = {name.removeprefix("module."): p.detach().clone() for name, p in model.named_parameters()}
    optimizer = DualOptimizer(build_parameter_groups(model), process_group=dist.group.WORLD, preset="omn")
    assert len(set(optimizer.plans[0].owners)) == 2
    reference = OMNReference(weights)
    for step in range(2):
        torch.manual_seed(10 * step + dist.get_rank())
        model(torch.randn(4, 8)).square().mean().backward()
        reference.step({name.removeprefix("module."): p.grad.clone() for name, p in model.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.detach(), reference.weights[name.removeprefix("module.")]), name


def test_distributed_data_parallel() -> None:
    run_ranks(2, _distributed_data_parallel)


# --- many ranks -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mesh_shape", [(8, 8, 8), (8, 64, 8)])
def test_hundreds_of_ranks_are_planned_from_dtensors(mesh_shape: tuple[int, int, int]) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    world_size = torch.Size(mesh_shape).numel()
    dist.init_process_group("fake", store=FakeStore(), rank=world_size - 1, world_size=world_size)
    try:
        mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("replicate", "shard", "tensor"))
        start = time.perf_counter()
        matrices = []
        for layer in range(8):
            for name, shape, placements in (
                ("up", (1376, 512), (COPY, _strided(8), ROWS)),
                ("down", (512, 1376), (COPY, ROWS, COLUMNS)),
            ):
                parameter = sharded(torch.empty(shape), mesh, placements)
                place = parameter_layout(f"{layer}.{name}", parameter)
                assert place.ranks == tuple(range(world_size))
                matrices.append(Matrix.whole(f"{layer}.{name}", place.layout).with_work(Work(5)))
        plan = plan_matrices(matrices, world_size)
        routes = [wave_route(plan, world_size - 1, wave) for wave in plan.waves]
        assert time.perf_counter() - start < 10
        assert len(set(plan.owners)) == 16
        assert int(plan.bytes_sent_by_rank.sum()) > 0
        # The last rank receives an update of each matrix of which it holds a part, and owns what the plan says.
        updated = {part.matrix for route in routes for part in route.scatter.received.segments}
        owned = {index for route in routes for index, _ in route.own}
        held = {index for index, matrix in enumerate(plan.matrices) if matrix.holdings.elements[-1]}
        assert updated | owned == held
    finally:
        dist.destroy_process_group()


# --- what is refused --------------------------------------------------------------------------------------------------------


def _partial() -> str:
    from torch.distributed.tensor import Partial

    mesh = init_device_mesh("cpu", (2,))
    parameter = nn.Parameter(DTensor.from_local(torch.ones(4, 4), mesh, [Partial()]))
    with pytest.raises(NotImplementedError) as caught:
        DualOptimizer([{"params": [parameter], "param_names": ["w"], "algorithm": "muon"}], preset="omn")
    return str(caught.value)


def test_partial_parameters_are_refused_at_construction() -> None:
    for message in run_ranks(2, _partial):
        assert message.startswith("parameter w of shape (4, 4): found placement P(sum) on a mesh of shape (2,), expected")


def _contradiction() -> str:
    mesh = init_device_mesh("cpu", (2,))
    local = torch.ones(3 if dist.get_rank() == 0 else 1, 4)
    parameter = nn.Parameter(DTensor.from_local(local, mesh, [ROWS], run_check=False, shape=torch.Size((4, 4)), stride=(4, 1)))
    with pytest.raises(NotImplementedError) as caught:
        DualOptimizer([{"params": [parameter], "param_names": ["w"], "algorithm": "muon"}], preset="omn")
    return str(caught.value)


def test_a_local_tensor_that_contradicts_its_placements_is_refused() -> None:
    first, second = run_ranks(2, _contradiction)
    assert "found a local tensor of shape (3, 4) on rank 0" in first
    assert "found a local tensor of shape (1, 4) on rank 1" in second
