"""NorMuon: the same bits for every world size and every split, with no collective beyond the two of a wave."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from recipe_references import normuon
from references import set_gradient, whole
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from omn_dist import DualOptimizer, build_parameter_groups
from omn_dist.optim.row_state import row_shape, row_state, zeros_for_rows
from omn_dist.plan.geometry.layout import ShardRegion

SHAPES = ((16, 16), (10, 7), (4, 24), (33, 8), (2, 8)) * 2
NAMES = [f"matrix_{index:02}" for index in range(len(SHAPES))]
NUM_STEPS = 3
FORMS = ("normuon", "normuon_code")


def _tensors(seed: int) -> list[Tensor]:
    """Low rank and noise, with blocks of rows whose scales differ: what breaks norms of shards."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for rows, columns in SHAPES:
        low_rank = torch.randn(rows, 2, generator=generator) @ torch.randn(2, columns, generator=generator)
        noise = torch.randn(rows, columns, generator=generator)
        scales = 10.0 ** -torch.linspace(0, 3, rows).round()
        found.append((low_rank + 1e-2 * noise) * scales[:, None])
    return found


def _run(mesh: DeviceMesh | None, placements: list[Any], **options: Any) -> tuple[list[Tensor], DualOptimizer]:
    """Weights, momentum and row moments after the last step."""
    weights = [tensor if mesh is None else distribute_tensor(tensor, mesh, placements) for tensor in _tensors(0)]
    parameters = [nn.Parameter(weight) for weight in weights]
    optimizer = DualOptimizer([{"params": parameters, "param_names": NAMES, "algorithm": "muon"}], **{"preset": "omn", **options})
    for step in range(NUM_STEPS):
        for parameter, gradient in zip(parameters, _tensors(1 + step), strict=True):
            set_gradient(parameter, gradient)
        optimizer.step()
    state = [optimizer.state[parameter] for parameter in parameters]
    tensors = [*parameters, *(one[key] for one in state for key in ("momentum_buffer", "row_second_moment"))]
    return [whole(tensor) for tensor in tensors], optimizer


def _every_split(preset: str) -> None:
    world_size = dist.get_world_size()
    expected, _ = _run(None, [], preset=preset)
    line = init_device_mesh("cpu", (world_size,))
    splits: list[tuple[DeviceMesh, list[Any]]] = [(line, [Shard(0)]), (line, [Shard(1)])]
    if world_size == 4:
        square = init_device_mesh("cpu", (2, 2))
        splits += [(square, [Shard(0), Shard(1)]), (square, [Replicate(), Shard(0)]), (square, [Shard(1), Replicate()])]
    for mesh, placements in splits:
        for wave_bytes, transport in ((1, "all_to_all"), (2**20, "all_gather")):
            found, optimizer = _run(mesh, placements, preset=preset, wave_bytes=wave_bytes, transport=transport)
            what = f"{preset}, {world_size} ranks, {placements}, {transport}"
            for index, (one, other) in enumerate(zip(found, expected, strict=True)):
                assert torch.equal(one, other), f"{what}: tensor {index} differs by {(one - other).abs().max()}"
            (plan,) = optimizer.plans
            assert optimizer.bytes_sent == NUM_STEPS * int(plan.bytes_sent_by_rank[dist.get_rank()]), what
            if transport == "all_to_all" and world_size > 1:
                assert len(plan.waves) > 1
                assert optimizer.num_collectives <= NUM_STEPS * 2 * len(plan.waves), what


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("preset", FORMS)
def test_normuon_is_bitwise_one_process(world_size: int, preset: str) -> None:
    run_ranks(world_size, _every_split, preset)


def _split_matrices() -> None:
    generator = torch.Generator().manual_seed(0)
    weight, *gradients = (torch.randn(20, 12, generator=generator) * 10.0 ** -torch.arange(20)[:, None] for _ in range(3))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def run(start: Tensor | DTensor, rows: slice, **view: Any) -> list[Tensor]:
        parameter = nn.Parameter(start.clone())
        optimizer = DualOptimizer([{"params": [parameter], "algorithm": "muon", **view}], preset="normuon", wave_bytes=1)
        for gradient in gradients:
            set_gradient(parameter, gradient[rows].T if "muon_transposed" in view else gradient[rows])
            optimizer.step()
        return [whole(tensor) for tensor in (parameter, optimizer.state[parameter]["row_second_moment"])]

    whole_runs = [run(weight[rows], rows) for rows in (slice(0, 8), slice(8, 15), slice(15, 20))]
    for placements in ([Shard(0)], [Shard(1)]):
        view = {"muon_shape": (20, 12), "muon_split_sizes": (8, 7, 5)}
        found = run(distribute_tensor(weight, mesh, placements), slice(None), **view)
        for one, other in zip(found, (torch.cat(parts) for parts in zip(*whole_runs, strict=True)), strict=True):
            assert torch.equal(one, other), f"{placements}: differs by {(one - other).abs().max()}"

    # Stored the other way round, operators keep their rows: now those are columns of the parameter.
    view = {"muon_shape": (20, 12), "muon_split_sizes": (8, 7, 5), "muon_transposed": True}
    expected = run(weight.T.contiguous(), slice(None), **view)
    assert expected[1].shape == (1, 20)
    assert torch.allclose(expected[0].T, torch.cat([run[0] for run in whole_runs]), rtol=0, atol=1e-6)
    for placements in ([Shard(0)], [Shard(1)]):
        found = run(distribute_tensor(weight.T.contiguous(), mesh, placements), slice(None), **view)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True)), f"transposed, {placements}"


def test_split_matrices_are_bitwise_matrices_of_their_own() -> None:
    run_ranks(3, _split_matrices)


def test_rows_of_transposed_and_stacked_operators() -> None:
    stack = nn.Parameter(torch.arange(2 * 3 * 4.0).view(2, 3, 4))
    for group, shape, segment, expected in (
        ({"muon_transposed": True}, [2, 1, 4], ShardRegion(3, 2, 3, 1, 0, 0), [5.0, 6.0]),
        ({}, [2, 3, 1], ShardRegion(2, 4, 3, 0, 0, 0), [3.0, 4.0]),
        ({"muon_shape": (2, 12)}, [2, 1, 1], ShardRegion(1, 4, 4, 0, 0, 0), [1.0]),
    ):
        moment = zeros_for_rows("a", stack, group)
        assert list(moment.shape) == row_shape(stack, group) == shape
        moment.view(-1).copy_(torch.arange(moment.numel()))
        rows = row_state(moment, stack, group)
        assert rows is not None
        assert rows.rows(segment).tolist() == expected


def _counted() -> int:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    _, optimizer = _run(mesh, [Shard(0)], preset="normuon", wave_bytes=1)
    (plan,) = optimizer.plans
    assert optimizer.num_collectives == NUM_STEPS * 2 * len(plan.waves)
    return len(plan.waves)


def test_two_collectives_a_wave() -> None:
    assert all(count >= 2 for count in run_ranks(3, _counted))


@pytest.mark.parametrize("preset", FORMS)
def test_normuon_against_the_reference(preset: str) -> None:
    found, _ = _run(None, [], preset=preset, ns_dtype="float32", lr=0.01, weight_decay=0.1)
    gradients = [_tensors(1 + step) for step in range(NUM_STEPS)]
    for index, weight in enumerate(_tensors(0)):
        expected = normuon(weight, [one[index] for one in gradients], lr=0.01, decay=0.1, published_code=preset == "normuon_code")
        # fp32 against fp64. Rows of a small update are lifted to the size of the others, and with them their rounding.
        assert float((found[index] - expected).norm() / (expected - weight).norm()) < 2e-4


@pytest.mark.parametrize("shape", [(32, 8), (8, 32), (12, 12)])
def test_update_norms_in_closed_form(shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(3)
    weight, gradient = torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)
    rows, columns = shape
    norms = {}
    for preset in FORMS:
        parameter = nn.Parameter(weight.clone())
        optimizer = DualOptimizer([{"params": [parameter], "algorithm": "muon"}], preset=preset, lr=0.5, weight_decay=0.0)
        parameter.grad = gradient
        optimizer.step()
        norms[preset] = float((parameter.detach() - weight).norm()) / 0.5
        moment = optimizer.state[parameter]["row_second_moment"]
        assert moment.shape == (rows, 1)
        # The first moment is 0.05 of the mean square of each row, so all rows of the update have one norm.
        row_norms = (parameter.detach() - weight).norm(dim=1)
        assert float(row_norms.max() / row_norms.min()) == pytest.approx(1, rel=1e-4)
    # The paper: 0.2 sqrt(m n), so a root mean square of 0.2 lr.
    assert norms["normuon"] == pytest.approx(0.2 * (rows * columns) ** 0.5, rel=1e-5)
    plain = nn.Parameter(weight.clone())
    muon = DualOptimizer([{"params": [plain], "algorithm": "muon"}], preset="normuon_code", algorithm="muon", lr=0.5)
    plain.grad = gradient
    muon.step()
    # The code keeps Muon's norm.
    assert norms["normuon_code"] == pytest.approx(float((plain.detach() - weight).norm()) / 0.5, rel=1e-5)


def test_zero_and_missing_gradients() -> None:
    weight = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    parameter, other = nn.Parameter(weight.clone()), nn.Parameter(weight.clone())
    optimizer = DualOptimizer([{"params": [parameter, other], "algorithm": "muon"}], preset="normuon", weight_decay=0.0)
    parameter.grad = torch.zeros_like(weight)
    optimizer.step()
    assert torch.equal(parameter, weight)
    assert not optimizer.state[parameter]["row_second_moment"].any()
    assert torch.equal(other, weight)
    other.grad = torch.ones_like(weight)
    parameter.grad = None
    before = {key: value.clone() for key, value in optimizer.state[parameter].items()}
    optimizer.step()
    assert not torch.equal(other, weight)
    assert all(torch.equal(before[key], value) for key, value in optimizer.state[parameter].items())


def _state_layout() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    _, optimizer = _run(mesh, [Shard(0), Shard(1)], preset="normuon")
    for parameter, state in optimizer.state.items():
        moment = state["row_second_moment"]
        assert isinstance(moment, DTensor)
        assert moment.shape == (parameter.shape[0], 1)
        assert moment.dtype == torch.float32
        assert moment.placements == (Shard(0), Replicate())
        copies = [torch.empty_like(moment.to_local()) for _ in range(2)]
        dist.all_gather(copies, moment.to_local(), group=mesh.get_group(1))
        assert torch.equal(*copies), "copies of a row moment must agree"
        assert moment.to_local().all()
    narrow = nn.Parameter(distribute_tensor(torch.ones(8, 1), mesh, [Shard(0), Shard(1)]))
    with pytest.raises(NotImplementedError, match=r"found a shard of shape \(4, 0\) on rank 1"):
        DualOptimizer([{"params": [narrow], "algorithm": "normuon"}], preset="omn")


def test_the_row_moment_is_sharded_like_the_rows() -> None:
    run_ranks(4, _state_layout)


def _state_dict_helpers() -> None:
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 3))
    fully_shard(model, mesh=mesh)
    first, second = (DualOptimizer(build_parameter_groups(model), preset="normuon") for _ in range(2))
    model(torch.ones(2, 8)).square().sum().backward()
    first.step()
    set_optimizer_state_dict(model, second, get_optimizer_state_dict(model, first))
    moments = 0
    for parameter in model.parameters():
        for key, value in first.state[parameter].items():
            other = second.state[parameter][key]
            assert torch.equal(whole(value), whole(other)), key
            moments += key == "row_second_moment"
            assert getattr(value, "placements", None) == getattr(other, "placements", None)
    assert moments == 2


def test_the_row_moment_goes_through_state_dicts() -> None:
    run_ranks(2, _state_dict_helpers)


def test_groups_on_muon_take_the_algorithm_of_the_preset() -> None:
    def of(algorithm: str, preset: str) -> str:
        optimizer = DualOptimizer([{"params": [nn.Parameter(torch.ones(4, 4))], "algorithm": algorithm}], preset=preset)
        return str(optimizer.param_groups[0]["algorithm"])

    assert of("muon", "normuon") == "normuon"
    assert of("muon", "omn") == "muon"
    assert of("normuon", "omn") == "normuon"
