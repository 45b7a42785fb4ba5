"""Plans with teams: exact partitions into slices, balance, costs and bytes, one answer for all."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
from counted_messages import counted_messages
from hypothesis import given, settings
from hypothesis import strategies as st

from omn_dist import plan_ownership
from omn_dist.algorithms.newton_schulz import RECIPES, build_recipe
from omn_dist.exchange.route import wave_route
from omn_dist.optim.matrices import with_work_of
from omn_dist.optim.presets import resolve_preset
from omn_dist.plan import Layout, Matrix, Plan, plan_matrices
from omn_dist.plan.assign.slices import slices_of
from omn_dist.plan.geometry.flops import newton_schulz_flops, slice_bytes, slice_collectives, slice_flops
from omn_dist.plan.geometry.layout import SHARD_ROWS, AxisPlacement
from omn_dist.plan.geometry.matrix import RowNumbers, Work
from omn_dist.plan.geometry.views import View, matrices_of
from omn_dist.plan.plan import with_teams
from omn_dist.plan.predict.devices import DEVICES, Device, Topology
from omn_dist.plan.predict.seconds import matrix_seconds, slice_seconds
from omn_dist.plan.predict.simulation import simulate
from omn_dist.plan.predict.teams import choose_teams
from omn_dist.studies.models import load_model

# One FLOP a second, two bytes a second inside a node of two ranks; no launches, no latency.
SLOW = Topology(ranks_per_node=2, inside_bytes_per_second=2.0, between_bytes_per_second=1.0, latency_seconds=0.0)
UNIT = Device(
    name="unit",
    float32_flops_per_second=1.0,
    bfloat16_flops_per_second=4.0,
    half_rate_side=0.0,
    memory_bytes_per_second=float("inf"),
    launch_seconds=0.0,
    topology=SLOW,
)
FAST = Topology(ranks_per_node=4, inside_bytes_per_second=1e30, between_bytes_per_second=1e30, latency_seconds=0.0)

sides = st.integers(1, 60)


def _covered(matrix: Matrix) -> np.ndarray[Any, Any]:
    """For each stored element its position in the matrix, counted row by row, or -1."""
    positions = np.full((matrix.layout.num_rows, matrix.layout.num_columns), -1)
    numbers = np.arange(matrix.num_elements).reshape(matrix.stored_rows, matrix.stored_columns)
    for region in matrix.region:
        target = positions[region.row : region.row + region.num_rows, region.column : region.column + region.num_columns]
        assert (target == -1).all(), "an element is there twice"
        rows = slice(region.at_row, region.at_row + region.num_rows)
        target[:] = numbers[rows, region.at_column : region.at_column + region.num_columns]
    return positions


@settings(max_examples=80, deadline=None)
@given(sides, sides, st.integers(1, 3), st.booleans(), st.integers(2, 8), st.integers(1, 5))
def test_slices_are_an_exact_partition(num_rows, num_columns, stack, transposed, size, world_size) -> None:  # type: ignore[no-untyped-def]
    stored = (num_columns, stack * num_rows) if transposed else (stack * num_rows, num_columns)
    view = View(shape=(stack, num_rows, num_columns), transposed=transposed)
    for matrix in matrices_of("w", view, Layout(stored, (world_size,), (SHARD_ROWS,))):
        matrix = matrix.with_work(Work(5))
        long = max(num_rows, num_columns)
        if size > long:
            with pytest.raises(ValueError, match=f"found a team of {size}, expected 2 to {long} members"):
                slices_of(matrix, size)
            continue
        slices = slices_of(matrix, size)
        cuts_rows = matrix.stored_rows >= matrix.stored_columns
        whole, short = _covered(matrix), min(num_rows, num_columns)
        rebuilt, end = np.full_like(whole, -1), 0
        for number, team_slice in enumerate(slices):
            assert team_slice.slice is not None
            assert (team_slice.slice.index, team_slice.slice.size, team_slice.slice.whole) == (number, size, matrix.name)
            assert team_slice.slice_sides == (short, team_slice.num_elements // short)
            assert team_slice.operator_shape == matrix.operator_shape == (num_rows, num_columns)
            assert abs(team_slice.num_elements / short - long / size) <= 1 + 2 * (long / size) / 32
            own = _covered(team_slice)
            row, column = np.divmod(own, team_slice.stored_columns)
            position = (row + end) * matrix.stored_columns + column if cuts_rows else row * matrix.stored_columns + column + end
            assert (rebuilt[own >= 0] == -1).all(), "an element is in two slices"
            rebuilt[own >= 0] = position[own >= 0]
            end += team_slice.slice_sides[1]
        assert (rebuilt == whole).all()
        # Rows of zeros that pad the last member's rows of the square count, nothing else is added.
        added = 5 * 2 * short**2 * (size * -(-short // size) - short)
        assert sum(team_slice.flops for team_slice in slices) == matrix.flops + added


def test_rows_are_cut_where_shards_end_and_columns_at_aligned_positions() -> None:
    tall = Matrix.whole("tall", Layout((5504, 2048), (256,), (SHARD_ROWS,)))
    assert [team_slice.stored_rows for team_slice in slices_of(tall, 2)] == [125 * 22, 5504 - 125 * 22]
    for rank in range(256):
        assert sum(bool(team_slice.shard_regions(rank)) for team_slice in slices_of(tall, 2)) <= 1
    wide = Matrix.whole("wide", Layout((2048, 5504), (256,), (SHARD_ROWS,)))
    assert [team_slice.stored_columns for team_slice in slices_of(wide, 3)] == [1840, 1824, 1840]
    odd = Matrix.whole("odd", Layout((2, 65), (2,), (SHARD_ROWS,)))
    assert [team_slice.stored_columns for team_slice in slices_of(odd, 2)] == [32, 33]


def _random_teams(plan: Plan, random: Any) -> dict[str, list[int]]:
    teams = {}
    for matrix in plan.matrices:
        most = min(plan.world_size, max(matrix.stored_rows, matrix.stored_columns))
        if most >= 2 and random.random() < 0.5:
            teams[matrix.name] = sorted(random.sample(range(plan.world_size), random.randint(2, most)))
    return teams


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(sides, sides), min_size=1, max_size=12),
    st.integers(2, 6),
    st.sampled_from([1, 500, 4_000, 2**20]),
    st.randoms(use_true_random=False),
)
def test_plans_with_teams(shapes, world_size, wave_bytes, random) -> None:  # type: ignore[no-untyped-def]
    whole = plan_ownership({f"m{index:02}": shape for index, shape in enumerate(shapes)}, world_size, wave_bytes=wave_bytes)
    teams = _random_teams(whole, random)
    plan = with_teams(whole, teams)
    assert plan == with_teams(whole, teams)
    assert plan.teams == {name: tuple(team) for name, team in teams.items()}
    assert (plan.hash == whole.hash) == (plan.description == whole.description)
    assert plan.num_matrices == len(shapes)
    # Whole matrices go where there is least to do.
    heaviest = max((matrix.flops for matrix in plan.matrices if matrix.slice is None), default=0)
    of_teams = with_teams(plan_matrices([m for m in whole.matrices if m.name in teams], world_size), teams).flops_by_rank
    assert plan.flops_by_rank.max() <= max(of_teams.max(), plan.flops_by_rank.sum() / world_size + heaviest) or any(
        len(matrix.candidates()) < world_size for matrix in whole.matrices
    )
    # All slices of a matrix are in one wave, and ranks that share teams work for them in one order.
    order = [
        [plan.matrices[group.matrices[0]].slice for group in wave_route(plan, rank, wave).owned]
        for wave in plan.waves
        for rank in range(world_size)
    ]
    order_by_name = [[own.whole for own in slices if own is not None] for slices in order]
    by_wave = [order_by_name[start : start + world_size] for start in range(0, len(order), world_size)]
    for ranks in by_wave:
        for one, other in itertools.combinations(ranks, 2):
            assert [name for name in one if name in other] == [name for name in other if name in one]
    assert sorted(name for ranks in by_wave for names in ranks for name in names) == sorted(
        name for name, team in teams.items() for _ in team
    )
    total = np.zeros(world_size, dtype=np.int64)
    for matrix, owner in zip(plan.matrices, plan.owners, strict=True):
        gather, scatter = counted_messages([matrix], [owner], [0], world_size, 4)
        total += gather.sum(axis=1) + scatter.sum(axis=0)
        total[owner] += matrix.team_bytes
    assert plan.bytes_sent_by_rank.tolist() == total.tolist()


def test_slices_stay_together_when_waves_are_small() -> None:
    whole = plan_ownership({f"m{index}": (32, 64) for index in range(16)}, 4, wave_bytes=4 * 32 * 64 * 2)
    teams = {f"m{index}": sorted((index % 4, (index + 1) % 4)) for index in range(0, 16, 3)}
    plan = with_teams(whole, teams)
    assert len(plan.waves) > 2
    assert plan.temporary_bytes <= 3 * plan.wave_bytes * 1.1
    assert plan.teams.keys() == teams.keys()


def test_plans_refuse_slices_that_are_no_team() -> None:
    whole = plan_ownership({"a": (4, 8), "b": (4, 8)}, 3)
    plan = with_teams(whole, {"a": [0, 1]})
    fields = (plan.world_size, plan.matrices, plan.owners, plan.waves, 4, plan.wave_bytes)
    assert Plan(*fields) == plan
    with pytest.raises(ValueError, match=r"the slices of a have the owners \[1, 0\]"):
        Plan(3, plan.matrices, (1, 0, 2), plan.waves, 4, plan.wave_bytes)
    with pytest.raises(ValueError, match=r"the slices of a have the owners \[0\]"):
        Plan(3, (plan.matrices[0], plan.matrices[2]), (0, 1), ((0, 1),), 4, plan.wave_bytes)
    with pytest.raises(ValueError, match="the slices of a are in several waves"):
        Plan(3, plan.matrices, plan.owners, ((0,), (1, 2)), 4, plan.wave_bytes)
    for teams, message in (({"c": [0, 1]}, "teams: found 'c'"), ({"a": [0, 3]}, r"found the team \[0, 3\]")):
        with pytest.raises(ValueError, match=message):
            with_teams(whole, teams)


def test_costs_of_a_slice_by_hand() -> None:
    # A step of 4 x 10 on one of two members: Gram matrix and product 2 x 2 x 4 x 4 x 10, and two of
    # four rows of the square.
    assert slice_flops(4, 10, 1, 2, "standard") == 2 * (2 * 4 * 4 * 10) + 2 * 2 * 4 * 4
    assert slice_flops(4, 10, 3, 2, "cubic") == 3 * 2 * (2 * 4 * 4 * 10)
    # Three times 2 x 4 fp32 numbers a step to the other, two fp64 numbers and an fp32 one.
    assert slice_bytes(4, 5, 2, "standard", 4) == 5 * 3 * 2 * 4 * 4 + 2 * 8 + 4
    assert slice_bytes(4, 5, 3, "cubic", 2) == 2 * (5 * 2 * 2 * 4 * 2 + 2 * 8 + 4)
    assert (slice_collectives(5, "standard"), slice_collectives(5, "cubic")) == (17, 12)
    flops, sent = slice_flops(4, 10, 5, 2, "standard"), slice_bytes(4, 5, 2, "standard", 4)
    assert slice_seconds(4, 10, 2, Work(5), UNIT, SLOW) == flops + sent / 2
    late = Topology(**{**vars(FAST), "latency_seconds": 1.0})
    assert slice_seconds(4, 10, 4, Work(5), UNIT, late) == pytest.approx(slice_flops(4, 10, 5, 4, "standard") + 17 * 2)


def test_a_simulated_team_starts_together() -> None:
    whole = plan_ownership({"a": (8, 16), "b": (8, 16), "c": (8, 16)}, 3)
    plan = with_teams(whole, {"a": [0, 1], "b": [1, 2]})
    (step,) = [event for event in simulate(plan, UNIT, FAST).events if event.activity == "orthogonalize"]
    seconds = matrix_seconds(next(matrix for matrix in plan.matrices if matrix.slice is not None), UNIT, FAST)
    owner = plan.owners[next(index for index, matrix in enumerate(plan.matrices) if matrix.slice is None)]
    expected = np.array([seconds, 2 * seconds, 2 * seconds])
    expected[owner] += newton_schulz_flops(8, 16, 5)
    assert (step.end - step.start).tolist() == pytest.approx(expected.tolist())


@pytest.mark.parametrize(
    ("world_size", "device", "most"), [(64, "cpu", 1.01), (256, "cpu", 1.15), (256, "h100", 1.15), (256, "a100", 1.15)]
)
def test_omn_1_is_balanced_beyond_whole_matrices(world_size: int, device: str, most: float) -> None:
    plan = plan_ownership(load_model("omn1").matrices, world_size)
    choice = choose_teams(plan, DEVICES[device])
    assert choice.pays
    assert choice.seconds < choice.whole_seconds
    assert choice.plan.imbalance <= most
    assert plan.imbalance > 1.147
    assert choice.plan.wave_imbalance <= most
    assert choice.plan.num_matrices == plan.num_matrices == 196
    assert choose_teams(plan, DEVICES[device]).plan == choice.plan
    per_node = DEVICES[device].topology.ranks_per_node
    for team in choice.plan.teams.values():
        # Consecutive ranks of one node, so that few process groups will do.
        assert team == tuple(range(team[0], team[0] + len(team)))
        assert team[0] % per_node % len(team) == 0
        assert team[0] // per_node == team[-1] // per_node
    assert choice.plan.temporary_bytes <= plan.temporary_bytes


def test_teams_that_do_not_pay_are_not_formed() -> None:
    plan = plan_ownership(load_model("omn1").matrices, 64)
    choice = choose_teams(plan, DEVICES["h100"])
    assert not choice.pays
    assert choice.plan is plan
    assert "do not pay on h100" in str(choice)


def test_nodes_are_those_that_are_given() -> None:
    plan = plan_ownership({"a": (64, 256)}, 4)
    fast = Device(**{**vars(UNIT), "topology": FAST})
    # Ranks 0 and 2 share a machine, and so do 1 and 3.
    teams = choose_teams(plan, fast, nodes=[0, 1, 0, 1]).plan.teams
    assert teams in ({"a": (0, 2)}, {"a": (1, 3)})
    assert choose_teams(plan, fast, nodes=[0, 1, 2, 3]).plan is plan
    assert choose_teams(plan, fast).plan.teams == {"a": (0, 1, 2, 3)}


def test_what_needs_one_owner_keeps_it() -> None:
    fast = Device(**{**vars(UNIT), "topology": FAST})
    layout = Layout((512, 1024), (4,), (SHARD_ROWS,))
    for fields, reason in (
        ({"algorithm": "normuon"}, "algorithm normuon"),
        ({"form": "gram"}, "the Gram form"),
        ({"spectral_cap": 1.0}, "spectral_cap"),
    ):
        matrix = with_work_of(Matrix.whole("a", layout), resolve_preset("omn", fields))
        choice = choose_teams(plan_matrices([matrix], 4), fast)
        assert choice.plan.owners == (0,)
        assert matrix.work.whole_only == reason
        assert f"{reason} needs one owner" in str(choice)
    # On a square matrix the Gram form costs more, so ``auto`` runs the standard one.
    square = with_work_of(Matrix.whole("a", Layout((256, 256), (4,), (SHARD_ROWS,))), resolve_preset("omn", {"form": "auto"}))
    assert choose_teams(plan_matrices([square], 4), fast).plan.teams
    # A matrix that one rank holds whole is owned by it.
    whole_there = Matrix.whole("a", Layout((64, 256), (4,), (AxisPlacement("shard", 0),))).with_work(Work(5))
    assert choose_teams(plan_matrices([whole_there], 4), fast).plan.teams
    one_row = Matrix.whole("a", Layout((1, 256), (4,), (AxisPlacement("shard", 0),))).with_work(Work(5))
    assert choose_teams(plan_matrices([one_row], 4), fast).plan.owners == (0,)


def test_the_work_of_a_recipe() -> None:
    numbers = RowNumbers(1, 1, 1)
    assert Work.of_recipe(RECIPES["torch"], 8, 16, row_numbers=numbers, whole_only="a cap") == Work(
        5, "standard", 2, numbers, "a cap"
    )
    assert Work.of_recipe(build_recipe("omn", "cubic"), 8, 16).form == "cubic"
    gram = build_recipe("omn", form="gram")
    assert Work.of_recipe(gram, 8, 16) == Work(5, "gram", whole_only="the Gram form")
    assert Work.of_recipe(gram, 8, 16, whole_only="a cap").whole_only == "a cap"
    # The automatic form is the one with fewer FLOPs: Gram where the long side is long.
    auto = build_recipe("omn", form="auto")
    assert [Work.of_recipe(auto, *shape).form for shape in ((8, 8), (8, 64), (64, 8))] == ["standard", "gram", "gram"]


def test_sums_of_a_team_plan_are_those_of_its_slices() -> None:
    plan = choose_teams(plan_ownership(load_model("omn1").matrices, 256), DEVICES["h100"]).plan
    flops = np.zeros(256)
    for matrix, owner in zip(plan.matrices, plan.owners, strict=True):
        flops[owner] += matrix.flops
    assert plan.flops_by_rank.tolist() == flops.tolist()
    assert plan.flops_by_rank.sum() == pytest.approx(
        sum(newton_schulz_flops(*shape, 5) for shape in load_model("omn1").matrices.values())
    )
    # Each half of a large matrix: 15 times 1024 x 2048 numbers to the other member.
    assert plan.team_collectives_by_rank.sum() == 84 * 2 * 17
    largest = int(plan.bytes_sent_by_rank.max())
    assert math.isclose(largest, 15 * 1024 * 2048 * 4 + 2 * 18.7 * 2**20, rel_tol=0.03)
