"""Layouts as data against what DTensor does, for any mesh and placements; no process group."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from omn_dist.plan import Layout, Matrix, Region, plan_matrices
from omn_dist.plan.geometry.layout import REPLICATE, AxisPlacement
from omn_dist.plan.geometry.matrix import Work


def _torch_placement(placement: AxisPlacement) -> Replicate | Shard | _StridedShard:
    if placement.kind == "replicate":
        return Replicate()
    if placement.kind == "shard":
        return Shard(placement.dim)
    return _StridedShard(placement.dim, split_factor=placement.split_factor)


def _local_by_dtensor(tensor: torch.Tensor, layout: Layout, coordinates: tuple[int, ...]) -> torch.Tensor:
    """What DTensor gives the rank at these mesh coordinates: its placements, from left to right."""
    for size, position, placement in zip(layout.mesh_shape, coordinates, layout.placements, strict=True):
        mine = _torch_placement(placement)
        if not isinstance(mine, Replicate):
            chunks, _ = mine._split_tensor(tensor, size, with_padding=False, contiguous=True)
            tensor = chunks[position]
    return tensor


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=2, max_size=3)))
    mesh_shape = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    placements = tuple(
        draw(
            st.one_of(
                st.just(REPLICATE),
                st.builds(lambda dim: AxisPlacement("shard", dim), st.integers(0, len(shape) - 1)),
                st.builds(
                    lambda dim, factor: AxisPlacement("strided", dim, factor), st.integers(0, len(shape) - 1), st.integers(1, 3)
                ),
            )
        )
        for _ in mesh_shape
    )
    return Layout(shape, mesh_shape, placements)


@settings(max_examples=300, deadline=None)
@given(layouts())
def test_regions_are_what_dtensor_holds(layout: Layout) -> None:
    tensor = torch.arange(1, 1 + math.prod(layout.shape)).view(layout.shape)
    flat = tensor.view(layout.num_rows, layout.num_columns)
    for rank, coordinates in enumerate(itertools.product(*map(range, layout.mesh_shape))):
        expected = _local_by_dtensor(tensor, layout, coordinates)
        assert layout.local_shape(rank) == tuple(expected.shape)
        found = torch.zeros(math.prod(expected.shape[:-1]), expected.shape[-1], dtype=torch.long)
        for region in layout.regions(rank):
            rows, columns = (
                slice(region.at_row, region.at_row + region.num_rows),
                slice(region.at_column, region.at_column + region.num_columns),
            )
            target = found[rows, columns]
            assert not target.any(), "two regions overlap"
            target.copy_(flat[region.row : region.row + region.num_rows, region.column : region.column + region.num_columns])
        assert torch.equal(found, expected.reshape(found.shape))


@settings(max_examples=100, deadline=None)
@given(layouts())
def test_each_copy_holds_every_element_once(layout: Layout) -> None:
    seen: dict[tuple[int, ...], torch.Tensor] = {}
    for rank in range(layout.world_size):
        count = seen.setdefault(layout.replica(rank), torch.zeros(layout.num_rows, layout.num_columns, dtype=torch.long))
        for region in layout.regions(rank):
            count[region.row : region.row + region.num_rows, region.column : region.column + region.num_columns] += 1
    replicated = [size for size, placement in zip(layout.mesh_shape, layout.placements, strict=True) if placement == REPLICATE]
    assert len(seen) == math.prod(replicated)
    assert all((count == 1).all() for count in seen.values())


def test_ranks_may_be_numbered_otherwise_than_the_mesh() -> None:
    # A mesh ((0, 2), (1, 3)): rank 1 has position 2 in the flattened mesh.
    placements = (AxisPlacement("shard", 0), AxisPlacement("shard", 1))
    layout = Layout((4, 4), (2, 2), placements, positions=(0, 2, 1, 3))
    assert layout.regions(1) == Layout((4, 4), (2, 2), placements).regions(2)


@pytest.mark.parametrize(
    ("experts", "mesh_shape", "placements"),
    [
        (8, (4,), (AxisPlacement("shard", 0),)),
        (8, (2, 2), (AxisPlacement("shard", 0), AxisPlacement("shard", 0))),
        (5, (2,), (AxisPlacement("shard", 0),)),
        (5, (3,), (AxisPlacement("shard", 0),)),
    ],
)
def test_experts_that_lie_whole_on_a_rank_do_not_travel(
    experts: int, mesh_shape: tuple[int, ...], placements: tuple[AxisPlacement, ...]
) -> None:
    layout = Layout((experts, 4, 6), mesh_shape, placements)
    matrices = [
        Matrix(f"experts[{index}]", "experts", 4, 6, (Region(4 * index, 0, 4, 6, 0, 0),), layout, work=Work(5))
        for index in range(experts)
    ]
    plan = plan_matrices(matrices, layout.world_size)
    assert not plan.bytes_sent_by_rank.any()
    assert int(plan.flops_by_rank.sum()) == sum(matrix.flops for matrix in matrices)
    for matrix, owner in zip(plan.matrices, plan.owners, strict=True):
        assert matrix.holdings.elements[owner] == matrix.num_elements


def test_load_of_local_matrices_counts_in_the_balance() -> None:
    experts = Layout((2, 32, 32), (4,), (AxisPlacement("shard", 0),))
    dense = Layout((32, 32), (4,), (AxisPlacement("shard", 0),))
    matrices = [
        Matrix(f"expert[{i}]", "expert", 32, 32, (Region(32 * i, 0, 32, 32, 0, 0),), experts, work=Work(5)) for i in range(2)
    ]
    matrices += [Matrix.whole(f"dense{i}", dense).with_work(Work(5)) for i in range(2)]
    plan = plan_matrices(matrices, 4)
    # Ranks 0 and 1 hold an expert each; the dense ones go to the ranks that have nothing.
    assert sorted(plan.owners) == [0, 1, 2, 3]
    assert plan.imbalance == 1.0


def test_copies_share_the_work_and_the_messages() -> None:
    layout = Layout((16, 16), (2, 2), (REPLICATE, AxisPlacement("shard", 0)))
    plan = plan_matrices([Matrix.whole(f"m{index}", layout).with_work(Work(5)) for index in range(8)], 4)
    assert plan.imbalance == 1.0
    total = sum(matrix.num_elements for matrix in plan.matrices) * 4
    # Each matrix: one half is gathered in its owner's copy; one half returns there, and the whole
    # goes to the other copy once.
    payload = int(plan.bytes_sent_by_rank.sum()) - 8 * 4 * (1 + 1 + 2)
    assert payload == total // 2 + total // 2 + total


def test_4096_ranks_on_a_mesh_of_three_axes_in_seconds() -> None:
    layout = Layout((5504, 2048), (8, 64, 8), (REPLICATE, AxisPlacement("strided", 0, 8), AxisPlacement("shard", 0)))
    other = Layout((2048, 5504), (8, 64, 8), (REPLICATE, AxisPlacement("shard", 0), AxisPlacement("shard", 1)))
    matrices = [Matrix.whole(f"m{index:03}", layout if index % 2 else other).with_work(Work(5)) for index in range(196)]
    plan = plan_matrices(matrices, 4096)
    assert len(set(plan.owners)) == 196
    assert plan.hash


def test_mistakes() -> None:
    with pytest.raises(ValueError, match="1 placements for 2 mesh axes"):
        Layout((4, 4), (2, 2), (REPLICATE,))
    with pytest.raises(ValueError, match="expected one of its dims"):
        Layout((4, 4), (2,), (AxisPlacement("shard", 2),))
