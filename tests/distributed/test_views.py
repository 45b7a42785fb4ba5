"""An update through a view is bitwise the update of separate parameters, wherever a shard edge cuts."""

import copy
import functools
import itertools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from references import OMNReference, set_gradient, whole, whole_tensors
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from omn_dist import DualOptimizer, build_parameter_groups
from omn_dist.roles import declare_view
from omn_dist.settings import SettingsError

NUM_STEPS = 3


class Case(NamedTuple):
    stored: tuple[int, ...]
    fields: dict[str, Any]
    matrices: Callable[[Tensor], Sequence[Tensor]]
    """The matrices, outputs in rows after leading dims, as views of the stored tensor, by indexing alone."""
    rows: Callable[[Tensor], Tensor] | None = None
    """The rows that AdamW updates."""


CASES = {
    "gate and up": Case((22, 8), {"muon_shape": (2, 11, 8)}, lambda w: [w[:11], w[11:]]),
    "qkv of one size": Case((24, 8), {"muon_shape": (3, 8, 8)}, lambda w: [w[:8], w[8:16], w[16:]]),
    "qkv, each head": Case((36, 8), {"muon_shape": (3, 3, 4, 8)}, lambda w: [w[4 * i : 4 * i + 4] for i in range(9)]),
    "qkv with fewer keys": Case(
        (20, 16), {"muon_shape": (20, 16), "muon_split_sizes": (8, 8, 2, 2)}, lambda w: [w[:8], w[8:16], w[16:18], w[18:]]
    ),
    "split sizes alone": Case((20, 16), {"muon_split_sizes": [12, 8]}, lambda w: [w[:12], w[12:]]),
    "qkv interleaved by head": Case(
        (36, 8), {"muon_shape": (3, 3, 4, 8), "muon_joined_axes": (0,)}, lambda w: [w.view(3, 3, 4, 8)[:, i] for i in range(3)]
    ),
    "qkv interleaved by query group": Case(
        (24, 8),
        {
            "muon_shape": (3, 8, 8),
            "muon_split_sizes": (4, 2, 2),
            "muon_split_names": ("q", "k", "v"),
            "muon_joined_axes": (0,),
        },
        lambda w: [w.view(3, 8, 8)[:, :4], w.view(3, 8, 8)[:, 4:6], w.view(3, 8, 8)[:, 6:]],
    ),
    "latent queries, each head": Case((15, 6), {"muon_shape": (3, 5, 6)}, lambda w: [w[:5], w[5:10], w[10:]]),
    "latent keys and values, each head": Case(
        (21, 4),
        {"muon_shape": (3, 7, 4), "muon_split_sizes": (4, 3)},
        lambda w: [part for i in range(3) for part in (w[7 * i : 7 * i + 4], w[7 * i + 4 : 7 * i + 7])],
    ),
    "experts": Case((4, 8, 16), {"muon_shape": (4, 8, 16)}, lambda w: list(w)),
    "experts with gate and up": Case(
        (3, 10, 6), {"muon_shape": (3, 2, 5, 6)}, lambda w: [part for expert in w for part in (expert[:5], expert[5:])]
    ),
    "experts, transposed, gate and up in turns": Case(
        (3, 6, 10),
        {"muon_shape": (3, 5, 2, 6), "muon_split_sizes": (1, 1), "muon_joined_axes": (1,), "muon_transposed": True},
        lambda w: [part for expert in w for part in (expert[:, ::2].T, expert[:, 1::2].T)],
    ),
    "qkv stored transposed": Case(
        (8, 24), {"muon_shape": (3, 8, 8), "muon_transposed": True}, lambda w: [w[:, :8].T, w[:, 8:16].T, w[:, 16:].T]
    ),
    "stored transposed": Case((8, 20), {"muon_shape": (20, 8), "muon_transposed": True}, lambda w: [w.T]),
    "convolution as a matrix": Case((6, 4, 3, 3), {"muon_shape": (6, 36)}, lambda w: [w.view(6, 36)]),
    "linear attention with an output gate": Case(
        (32, 6),
        {
            "muon_shape": (2, 16, 6),
            "muon_split_sizes": (3, 3, 5, 5),
            "muon_split_names": ("q", "k", "v", "gate"),
            "muon_split_algorithms": ("muon", "muon", "muon", "adamw"),
            "muon_joined_axes": (0,),
            "adamw_lr": 0.003,
            "adamw_weight_decay": 0.05,
        },
        lambda w: [w.view(2, 16, 6)[:, :3], w.view(2, 16, 6)[:, 3:6], w.view(2, 16, 6)[:, 6:11]],
        lambda w: w.view(2, 16, 6)[:, 11:],
    ),
    "gated queries, transposed, each head": Case(
        (6, 24),
        {
            "muon_shape": (3, 8, 6),
            "muon_split_sizes": (4, 4),
            "muon_split_algorithms": ("muon", "adamw"),
            "muon_transposed": True,
            "adamw_lr": 0.003,
            "adamw_weight_decay": 0.05,
        },
        lambda w: [w[:, 8 * i : 8 * i + 4].T for i in range(3)],
        lambda w: w.view(6, 3, 8)[:, :, 4:],
    ),
}
SHAPES = [case.stored for case in CASES.values()]


def _as_matrix(part: Tensor) -> Tensor:
    return part.reshape(-1, part.shape[-1]).clone(memory_format=torch.contiguous_format)


@functools.cache
def _reference(preset: str) -> list[Tensor]:
    """Each stored tensor after the last step, from matrices and rows that are parameters of their own."""
    stored = whole_tensors(SHAPES, 0)
    gradients = [whole_tensors(SHAPES, 100 + step) for step in range(NUM_STEPS)]
    betas, epsilon = ((0.9, 0.95), 1e-8) if preset == "omn" else ((0.9, 0.999), 1e-8)
    for index, case in enumerate(CASES.values()):
        parts = list(case.matrices(stored[index]))
        matrices = [_as_matrix(part) for part in parts]
        on_muon = [nn.Parameter(matrix) for matrix in matrices]
        omn = OMNReference({str(number): matrix for number, matrix in enumerate(matrices)}, weight_decay=0.1)
        muon = torch.optim.Muon(on_muon, weight_decay=0.1)
        rows = None if case.rows is None else nn.Parameter(case.rows(stored[index]).clone())
        adamw = None if rows is None else torch.optim.AdamW([rows], lr=0.003, betas=betas, eps=epsilon, weight_decay=0.05)
        for by_step in gradients:
            found = [_as_matrix(part) for part in case.matrices(by_step[index])]
            omn.step({str(number): gradient for number, gradient in enumerate(found)})
            for parameter, gradient in zip(on_muon, found, strict=True):
                parameter.grad = gradient
            muon.step()
            if adamw is not None and rows is not None and case.rows is not None:
                rows.grad = case.rows(by_step[index]).clone()
                adamw.step()
        updated = list(omn.weights.values()) if preset == "omn" else on_muon
        with torch.no_grad():
            for part, matrix in zip(parts, updated, strict=True):
                part.copy_(matrix.view(part.shape))
            if rows is not None and case.rows is not None:
                case.rows(stored[index]).copy_(rows)
    return stored


def _optimizer(
    mesh: DeviceMesh | None, placements: Sequence[Placement], **options: Any
) -> tuple[list[nn.Parameter], DualOptimizer]:
    parameters = [
        nn.Parameter(tensor if mesh is None else distribute_tensor(tensor, mesh, placements)) for tensor in whole_tensors(SHAPES, 0)
    ]
    groups = [
        {"params": [parameter], "param_names": [name], "algorithm": "muon", "weight_decay": 0.1, **case.fields}
        for parameter, (name, case) in zip(parameters, CASES.items(), strict=True)
    ]
    return parameters, DualOptimizer(groups, **{"preset": "omn", **options})


def _step(parameters: Sequence[nn.Parameter], optimizer: DualOptimizer, step: int) -> None:
    for parameter, gradient in zip(parameters, whole_tensors(SHAPES, 100 + step), strict=True):
        set_gradient(parameter, gradient)
    optimizer.step()


def _compare(found: Sequence[Tensor], expected: Sequence[Tensor], what: str) -> None:
    for name, one, other in zip(CASES, found, expected, strict=True):
        assert torch.equal(whole(one), other), f"{what}: {name} differs by {(whole(one) - other).abs().max()}"


@functools.cache
def _plain(preset: str) -> tuple[list[nn.Parameter], DualOptimizer]:
    """Plain tensors after the last step."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain, optimizer = _optimizer(None, (), preset=preset)
    for step in range(NUM_STEPS):
        _step(plain, optimizer, step)
    return plain, optimizer


def _compare_state(parameters: Sequence[nn.Parameter], optimizer: DualOptimizer, preset: str) -> None:
    """State is that of plain tensors, so it can go to any number of ranks; the moments of rows that are matrices stay zero."""
    plain, other = _plain(preset)
    for one, two, case in zip(parameters, plain, CASES.values(), strict=True):
        state, expected = optimizer.state[one], other.state[two]
        names = {"momentum_buffer"} if case.rows is None else {"momentum_buffer", "step", "exp_avg", "exp_avg_sq"}
        assert state.keys() == expected.keys() == names
        for name in names:
            assert torch.equal(whole(state[name]), expected[name]), name
        if case.rows is not None:
            assert int(state["step"]) == NUM_STEPS
            moment = expected["exp_avg"].clone()
            assert bool(case.rows(moment).all())
            case.rows(moment).zero_()
            assert not bool(moment.any())


def _through_views(mesh_shape: tuple[int, ...], placements: Sequence[Placement]) -> None:
    mesh = init_device_mesh("cpu", mesh_shape)
    for preset, wave_bytes in itertools.product(("torch", "omn"), (1, 2**20)):
        parameters, optimizer = _optimizer(mesh, placements, preset=preset, wave_bytes=wave_bytes)
        for step in range(NUM_STEPS):
            _step(parameters, optimizer, step)
        _compare(parameters, _reference(preset), f"{preset} on {mesh_shape}, {wave_bytes}")
        _compare_state(parameters, optimizer, preset)
        (plan,) = optimizer.plans
        assert optimizer.bytes_sent == NUM_STEPS * int(plan.bytes_sent_by_rank[dist.get_rank()])


@pytest.mark.parametrize(
    ("mesh_shape", "placements"),
    [((1,), [Shard(0)]), ((2,), [Shard(0)]), ((4,), [Shard(0)]), ((2,), [Shard(1)]), ((2, 2), [Replicate(), Shard(0)])],
)
def test_views_are_bitwise_separate_parameters(mesh_shape: tuple[int, ...], placements: list[Placement]) -> None:
    run_ranks(torch.Size(mesh_shape).numel(), _through_views, mesh_shape, placements)


@pytest.mark.parametrize("preset", ["torch", "omn"])
def test_views_of_plain_tensors(preset: str) -> None:
    torch.set_num_threads(1)
    parameters, optimizer = _plain(preset)
    _compare(parameters, _reference(preset), preset)
    names = {matrix.name for plan in optimizer.plans for matrix in plan.matrices}
    assert {"qkv interleaved by query group[q]", "latent keys and values, each head[2.1]", "stored transposed"} <= names
    assert "linear attention with an output gate[gate]" not in names


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if len(case.stored) == 2 and name != "stored transposed"])
def test_the_comparison_sees_a_missing_view(name: str) -> None:
    index = list(CASES).index(name)
    parameter = nn.Parameter(whole_tensors(SHAPES, 0)[index])
    optimizer = DualOptimizer([{"params": [parameter], "algorithm": "muon", "weight_decay": 0.1}], preset="omn")
    for step in range(NUM_STEPS):
        parameter.grad = whole_tensors(SHAPES, 100 + step)[index]
        optimizer.step()
    assert not torch.allclose(parameter, _reference("omn")[index], atol=1e-3)


def _separate(preset: str) -> list[Tensor]:
    """Each stored tensor after the last step of the same optimizer on matrices and rows that are parameters of their own."""
    stored = whole_tensors(SHAPES, 0)
    for index, case in enumerate(CASES.values()):
        parts = list(case.matrices(stored[index]))
        parameters = [nn.Parameter(_as_matrix(part)) for part in parts]
        groups: list[dict[str, Any]] = [{"params": parameters, "algorithm": "muon", "weight_decay": 0.1}]
        if case.rows is not None:
            parts.append(case.rows(stored[index]))
            parameters.append(nn.Parameter(parts[-1].clone()))
            groups = [
                {"params": parameters[:-1], "algorithm": "muon", "weight_decay": 0.1},
                {"params": parameters[-1:], "algorithm": "adamw", "lr": 0.003, "weight_decay": 0.05},
            ]
        optimizer = DualOptimizer(groups, preset=preset)
        for step in range(NUM_STEPS):
            gradient = whole_tensors(SHAPES, 100 + step)[index]
            gradients = [_as_matrix(part) for part in case.matrices(gradient)]
            gradients.extend([] if case.rows is None else [case.rows(gradient).clone()])
            for parameter, its_gradient in zip(parameters, gradients, strict=True):
                parameter.grad = its_gradient
            optimizer.step()
        with torch.no_grad():
            for part, parameter in zip(parts, parameters, strict=True):
                part.copy_(parameter.view(part.shape))
    return stored


def _row_normalised() -> None:
    warnings.simplefilter("ignore")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parameters, optimizer = _optimizer(mesh, [Shard(0)], preset="normuon")
    for step in range(NUM_STEPS):
        _step(parameters, optimizer, step)
    _compare(parameters, _separate("normuon"), "normuon")


@pytest.mark.parametrize("world_size", [3])
def test_row_moments_follow_the_rows_of_views(world_size: int) -> None:
    run_ranks(world_size, _row_normalised)


def _whole_experts() -> None:
    mesh = init_device_mesh("cpu", (2,))
    (weight,), (gradient,) = whole_tensors([(4, 8, 16)], 0), whole_tensors([(4, 8, 16)], 1)
    parameter = nn.Parameter(distribute_tensor(weight, mesh, [Shard(0)]))
    optimizer = DualOptimizer([{"params": [parameter], "algorithm": "muon", "muon_shape": (4, 8, 16)}], preset="omn")
    set_gradient(parameter, gradient)
    optimizer.step()
    assert (optimizer.num_collectives, optimizer.bytes_sent) == (0, 0)
    (plan,) = optimizer.plans
    assert [plan.owners[index] for index in range(4)] == [0, 0, 1, 1]


def test_whole_experts_on_each_rank_need_no_collective() -> None:
    run_ranks(2, _whole_experts)


SHAPES_OF_GATED = [(3, 5, 4), (6, 4), (18, 4)]


class Gated(nn.Module):
    """Fused queries and gates with three heads, and a stack of experts."""

    muon_views: ClassVar[dict[str, Any]] = {"experts": (3, 5, 4)}

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.query = nn.Linear(4, 18, bias=False)
        declare_view(
            self.query,
            (3, 6, 4),
            split_sizes=(4, 2),
            split_names=("q", "gate"),
            split_algorithms=("muon", "adamw"),
            joined_axes=(0,),
        )
        self.experts = nn.Parameter(torch.empty(3, 5, 4))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        return self.query(x).square().sum() + (self.experts @ x.T).square().sum()


def _filled(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), whole_tensors(SHAPES_OF_GATED, 5), strict=True):
            if isinstance(parameter, DTensor):
                value = distribute_tensor(value, parameter.device_mesh, parameter.placements)
            parameter.copy_(value)


def _sharded_model() -> None:
    plain = Gated()
    with torch.device("meta"):
        model = Gated()
    before = build_parameter_groups(model, weight_decay=0.1)
    fully_shard(model)
    model.to_empty(device="cpu")
    models = [plain, model]
    optimizers = []
    for one in models:
        _filled(one)
        groups = build_parameter_groups(one, weight_decay=0.1)
        for found, expected in zip(groups, before, strict=True):
            assert {**found, "params": None} == {**expected, "params": None}
        optimizers.append(DualOptimizer(groups, preset="omn"))
    for _ in range(3):
        for one, optimizer in zip(models, optimizers, strict=True):
            one(torch.tensor([0, 2, 5])).backward()
            optimizer.step()
            optimizer.zero_grad()
    for (name, one), other in zip(plain.named_parameters(), model.parameters(), strict=True):
        # Gradients of the ranks are averaged, which is exact for two equal ones.
        assert torch.equal(one, whole(other)), name


def test_a_model_with_views_is_trained_the_same_under_fully_shard() -> None:
    run_ranks(2, _sharded_model)


# --- rows that AdamW updates --------------------------------------------------------------------------------------------


def _gated(**fields: Any) -> tuple[nn.Parameter, DualOptimizer]:
    (weight,) = whole_tensors([(12, 6)], 0)
    parameter = nn.Parameter(weight)
    group = {
        "params": [parameter],
        "algorithm": "muon",
        "muon_shape": (12, 6),
        "muon_split_sizes": (8, 4),
        "muon_split_algorithms": ("muon", "adamw"),
    }
    return parameter, DualOptimizer([group | fields], preset="omn")


def test_rows_have_their_own_rate_and_follow_a_scheduler() -> None:
    parameter, optimizer = _gated(lr=0.02, adamw_lr=0.004)
    rows = nn.Parameter(parameter[8:].detach().clone())
    adamw = torch.optim.AdamW([rows], lr=0.004, betas=(0.9, 0.95), weight_decay=0.0)
    schedulers = [
        torch.optim.lr_scheduler.LambdaLR(one, lambda step: (1.0, 0.5, 0.25, 0.5, 1.0)[step]) for one in (optimizer, adamw)
    ]
    for step in range(4):
        (gradient,) = whole_tensors([(12, 6)], 100 + step)
        parameter.grad, rows.grad = gradient, gradient[8:].clone()
        optimizer.step()
        adamw.step()
        assert torch.equal(parameter[8:], rows)
        for scheduler in schedulers:
            scheduler.step()


def test_rows_keep_explicit_zeros_and_stay_without_a_gradient() -> None:
    parameter, optimizer = _gated(adamw_lr=0.0, lr=0.0)
    before = parameter.detach().clone()
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert torch.equal(parameter, before)
    other, optimizer = _gated()
    companion = nn.Parameter(torch.ones(2, 2))
    optimizer.add_param_group({"params": [companion], "algorithm": "adamw"})
    companion.grad = torch.ones(2, 2)
    before = other.detach().clone()
    optimizer.step()
    assert torch.equal(other, before)
    assert all(not bool(value.any()) for value in optimizer.state[other].values())


def test_state_of_rows_survives_a_checkpoint() -> None:
    parameter, optimizer = _gated()
    for step in range(2):
        (parameter.grad,) = whole_tensors([(12, 6)], 100 + step)
        optimizer.step()
    other, loaded = _gated()
    with torch.no_grad():
        other.copy_(parameter)
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for one, its_optimizer in ((parameter, optimizer), (other, loaded)):
        (one.grad,) = whole_tensors([(12, 6)], 200)
        its_optimizer.step()
    assert torch.equal(parameter, other)


# --- mistakes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"muon_shape": (2, 5, 6)}, r"found stored shape \(12, 6\) for muon_shape \(2, 5, 6\), that is 10 x 6"),
        ({"muon_shape": (2, 0, 6)}, r"muon_shape: found \(2, 0, 6\), expected at least two positive"),
        ({"muon_shape": (12, 6), "muon_split_sizes": (8, 3)}, r"\(8, 3\) with sum 11, expected the sum 12 of"),
        ({"muon_split_sizes": (8, 3)}, r"\(8, 3\) with sum 11, expected the sum 12 of"),
        ({"muon_split_sizes": (8, 4), "muon_split_algorithms": ("muon",)}, "expected 2 of them"),
        ({"muon_split_sizes": (8, 4), "muon_split_algorithms": ("adamw", "adamw")}, "no split on muon"),
        ({"muon_split_sizes": (8, 4), "muon_split_names": ("q", "q")}, "different names"),
        ({"muon_shape": (2, 6, 6), "muon_joined_axes": (1,)}, "ascending axes"),
        ({"muon_shape": (6, 12, 1), "muon_transposed": True}, "transposed"),
        ({"muon_shap": (2, 6, 6)}, "did you mean 'muon_shape'"),
    ],
)
def test_views_that_cannot_be_are_one_clear_line(fields: dict[str, Any], message: str) -> None:
    parameter = nn.Parameter(torch.ones(12, 6))
    with pytest.raises(ValueError, match=message) as caught:
        DualOptimizer([{"params": [parameter], "param_names": ["w"], "algorithm": "muon", **fields}], preset="omn")
    assert "\n" not in str(caught.value)


def test_a_view_on_adamw_is_refused() -> None:
    with pytest.raises(SettingsError, match="muon_shape"):
        DualOptimizer([{"params": [nn.Parameter(torch.ones(4, 4))], "algorithm": "adamw", "muon_shape": (2, 2, 4)}], preset="omn")


@pytest.mark.parametrize(
    ("shape", "fields", "message"),
    [
        ((12, 6), {"muon_split_sizes": (6, 6)}, r"parameter w: muon_split_sizes saved as \[8, 4\], found \[6, 6\]"),
        ((12, 6), {"muon_split_sizes": None}, r"parameter w: muon_split_sizes saved as \[8, 4\], found None"),
        ((14, 6), {"muon_shape": (14, 6), "muon_split_sizes": (8, 6)}, r"parameter w: shape saved as \(12, 6\), found \(14, 6\)"),
    ],
)
def test_a_checkpoint_with_another_view_names_parameter_and_change(
    shape: tuple[int, ...], fields: dict[str, Any], message: str
) -> None:
    def build(shape: tuple[int, ...], fields: dict[str, Any]) -> DualOptimizer:
        group = {"params": [nn.Parameter(torch.ones(shape))], "param_names": ["w"], "algorithm": "muon", "muon_shape": (12, 6)}
        return DualOptimizer([group | fields], preset="omn")

    saved = build((12, 6), {"muon_split_sizes": (8, 4)}).state_dict()
    with pytest.raises(ValueError, match=message):
        build(shape, fields).load_state_dict(saved)
