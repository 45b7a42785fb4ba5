"""Views that a model declares, by call or by attribute, and errors for impossible ones."""

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from omn_dist import build_parameter_groups, plan_ownership
from omn_dist.plan.geometry.layout import REPLICATE, Layout
from omn_dist.plan.geometry.views import View
from omn_dist.roles import declare_view, route_parameters


class Attention(nn.Module):
    """Latent attention and a feed-forward, with the attributes that give their layouts."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.d_head, self.d_shared, self.dv_head = 2, 4, 3, 6
        self.d_model = 8
        self.W_UQ = nn.Linear(5, 2 * 7, bias=False)
        self.W_UKV = nn.Linear(8, 2 * 10, bias=False)
        self.QKV = nn.Linear(8, 3 * 2 * 4, bias=False)
        self.gate_up_proj = nn.Linear(8, 32, bias=False)
        self.intermediate_size = 16


def _views(model: nn.Module) -> dict[str, str]:
    return {route.name: str(route.view) for route in route_parameters(model) if route.view is not None}


def test_layouts_that_follow_from_attributes() -> None:
    assert _views(Attention()) == {
        "W_UQ.weight": "(2, 7, 5)",
        "W_UKV.weight": "(2, 10, 8) k 4, v 6",
        "QKV.weight": "(3, 2, 4, 8)",
        "gate_up_proj.weight": "(2, 16, 8)",
    }
    groups = {tuple(group["muon_shape"]): group for group in build_parameter_groups(Attention())}
    assert groups[2, 10, 8]["muon_split_sizes"] == (4, 6)
    assert _views(nn.MultiheadAttention(8, 2)) == {"in_proj_weight": "(24, 8) q 8, k 8, v 8"}


def test_a_view_leaves_the_parameter_as_it_is() -> None:
    linear = nn.Linear(8, 24)
    before = dict(linear.named_parameters())
    declare_view(linear, (3, 8, 8))
    after = dict(linear.named_parameters())
    assert before.keys() == after.keys()
    assert all(before[name] is after[name] for name in before)
    assert linear.state_dict().keys() == {"weight", "bias"}


def test_one_attribute_is_enough_and_survives_copies() -> None:
    model = nn.Sequential(nn.Linear(8, 24, bias=False), nn.Linear(24, 8, bias=False))
    views: Any = {"0.weight": (3, 8, 8), "1.weight": {"shape": [8, 24], "split_sizes": [5, 3]}}
    model.muon_views = views
    expected = {"0.weight": "(3, 8, 8)", "1.weight": "(8, 24) 5, 3"}
    assert _views(model) == expected
    assert _views(copy.deepcopy(model)) == expected
    assert set(_views(torch.compile(model)).values()) == set(expected.values())


def test_a_declared_view_is_stronger_than_a_known_layout_and_than_a_name() -> None:
    attention = Attention()
    declare_view(attention, (2, 3, 4, 8), parameter="QKV.weight")
    assert _views(attention)["QKV.weight"] == "(2, 3, 4, 8)"
    model = nn.ModuleDict({"gate": nn.Linear(8, 8, bias=False)})
    assert route_parameters(model)[0].role == "router"
    declare_view(model["gate"], (2, 4, 8))
    assert route_parameters(model)[0].algorithm == "muon"


def _shared(one: tuple[int, ...], other: tuple[int, ...]) -> nn.Module:
    model = nn.ModuleDict({"a": nn.Linear(8, 24, bias=False), "b": nn.Linear(8, 24, bias=False)})
    model["b"].weight = model["a"].weight
    declare_view(model["a"], one)
    declare_view(model["b"], other)
    return model


def test_conflicting_views_of_a_shared_weight_are_refused() -> None:
    assert set(_views(_shared((3, 8, 8), (3, 8, 8)))) == {"a.weight"}
    with pytest.raises(ValueError, match=r"shared parameter of shape \(24, 8\).*\(2, 12, 8\).*on b.*\(3, 8, 8\).*on a"):
        build_parameter_groups(_shared((3, 8, 8), (2, 12, 8)))
    linear = nn.Linear(8, 24)
    declare_view(linear, (3, 8, 8))
    declare_view(linear, (3, 8, 8))
    with pytest.raises(ValueError, match="declared before"):
        declare_view(linear, (2, 12, 8))


def _with_views(views: Any) -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 24, bias=False), nn.Embedding(6, 8), nn.LayerNorm(8))
    model.muon_views = views
    return model


@pytest.mark.parametrize(
    ("views", "message"),
    [
        ({"0.weight": (3, 9, 8)}, r"parameter 0.weight: found stored shape \(24, 8\) for muon_shape \(3, 9, 8\)"),
        ({"0.weigth": (3, 8, 8)}, "found no parameter '0.weigth'"),
        ({"0.weight": {"shap": (3, 8, 8)}}, "expected a View, its fields"),
        ({"0.weight": (3, -8, 8)}, "positive integers"),
        ({"1.weight": (2, 3, 8)}, "of the embedding"),
        ((3, 8, 8), "expected parameter paths"),
    ],
)
def test_declarations_that_cannot_be(views: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_parameter_groups(_with_views(views))


def test_rules_by_module_and_class() -> None:
    model = nn.ModuleDict({"a": Attention(), "b": Attention(), "out": nn.Linear(8, 8, bias=False)})
    names = {route.name for route in route_parameters(model, {model["a"]: "adamw"}) if route.algorithm == "muon"}
    assert names == {"b.W_UQ.weight", "b.W_UKV.weight", "b.QKV.weight", "b.gate_up_proj.weight", "out.weight"}
    assert all(route.algorithm == "adamw" for route in route_parameters(model, {nn.Linear: "adamw"}))
    for rules, message in (
        ({nn.Conv1d: "adamw"}, "'class Conv1d' matches no"),
        ({nn.Linear(2, 2): "adamw"}, "'module Linear at .*' matches no"),
        ({7: "adamw"}, "found the key 7"),
        ({nn.Linear: "adamw", "out.*": "muon"}, "out.weight is matched by .* different algorithms"),
    ):
        with pytest.raises(ValueError, match=message):
            route_parameters(model, rules)  # type: ignore[arg-type]


class TopKRouter(nn.Linear):
    pass


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ngram_table = nn.Embedding(32, 8)
        self.bag = nn.EmbeddingBag(32, 8)
        self.attn_res_proj = nn.Linear(8, 1, bias=False)
        self.in_proj_ba = nn.Linear(8, 4, bias=False)
        self.A_log = nn.Parameter(torch.zeros(8, 4))
        self.gr_down = nn.Linear(8, 4, bias=False)
        self.choose = TopKRouter(8, 4, bias=False)
        self.narrow = nn.Linear(256, 2, bias=False)
        self.q_proj = nn.Linear(256, 2, bias=False)
        self.g_proj = nn.Linear(8, 8, bias=False)
        self.experts = nn.ModuleList([nn.Linear(8, 16, bias=False)])
        self.output = nn.Linear(8, 32, bias=False)
        self.layers = nn.ModuleList([nn.ModuleDict({"output": nn.Linear(8, 8, bias=False)})])


def test_roles_beyond_projections() -> None:
    found = {route.name: (route.role, route.algorithm, route.has_decay) for route in route_parameters(Parts())}
    assert found == {
        "ngram_table.weight": ("table", "adamw", False),
        "bag.weight": ("table", "adamw", False),
        "attn_res_proj.weight": ("residual_query", "adamw", False),
        "in_proj_ba.weight": ("scalar", "adamw", True),
        "A_log": ("scalar", "adamw", False),
        "gr_down.weight": ("low_rank", "adamw", True),
        "choose.weight": ("router", "adamw", True),
        "narrow.weight": ("low_rank", "adamw", True),
        "q_proj.weight": ("projection", "muon", True),
        "g_proj.weight": ("gate", "adamw", True),
        "experts.0.weight": ("expert", "muon", True),
        "output.weight": ("head", "adamw", False),
        "layers.0.output.weight": ("projection", "muon", True),
    }


# --- algebra --------------------------------------------------------------------------------------


@st.composite
def _views_and_shapes(draw: st.DrawFn) -> tuple[View, tuple[int, ...]]:
    axes = draw(st.lists(st.integers(1, 3), max_size=3))
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    columns = draw(st.integers(1, 4))
    joined = tuple(axis for axis in range(len(axes)) if draw(st.booleans()))
    view = View(shape=(*axes, sum(sizes), columns), split_sizes=tuple(sizes), joined_axes=joined, transposed=draw(st.booleans()))
    rows = sum(sizes)
    for axis in axes:
        rows *= axis
    if not view.transposed:
        return view, (rows, columns)
    stack = axes[0] if axes else 1
    return view, (stack, columns, rows // stack) if draw(st.booleans()) else (columns, rows)


@given(_views_and_shapes())
def test_matrices_cover_a_parameter_exactly_once(case: tuple[View, tuple[int, ...]]) -> None:
    view, shape = case
    view.check("w", shape)
    layout = Layout(shape, (1,), (REPLICATE,))
    seen = torch.zeros(layout.num_rows, layout.num_columns, dtype=torch.int64)
    for matrix in view.matrices("w", layout):
        inside = torch.zeros(matrix.stored_rows, matrix.stored_columns, dtype=torch.int64)
        assert matrix.num_columns == view.shape[-1]
        for region in matrix.region:
            seen[region.row : region.row + region.num_rows, region.column : region.column + region.num_columns] += 1
            inside[region.at_row : region.at_row + region.num_rows, region.at_column : region.at_column + region.num_columns] += 1
        assert bool((inside == 1).all())
    assert bool((seen == 1).all())
    assert View.from_group(view.as_fields()) == view


def test_the_plan_works_on_split_matrices() -> None:
    plan = plan_ownership(build_parameter_groups(Attention()), 4)
    names = [matrix.name for matrix in plan.matrices]
    assert len(names) == 2 + 4 + 6 + 2
    assert {"W_UKV.weight[0.k]", "W_UKV.weight[1.v]", "QKV.weight[2.1]", "gate_up_proj.weight[0]"} <= set(names)
    by_name = {matrix.name: matrix for matrix in plan.matrices}
    assert (by_name["W_UKV.weight[1.v]"].num_rows, by_name["W_UKV.weight[1.v]"].num_columns) == (6, 8)
    # Half of a fused tensor costs as much as a separate parameter of that size.
    assert by_name["gate_up_proj.weight[0]"].flops == next(matrix.flops for matrix in plan_ownership({"up": (16, 8)}, 4).matrices)
