"""Judging windows and clipping in one process. tests/distributed/test_training.py has ranks."""

import math

import pytest
import torch
from torch import nn

from omn_dist.train.norms import UpdateNorms, view_groups
from omn_dist.train.window import clip_gradients, judge_window

CPU = torch.device("cpu")


def _groups(num_adamw_groups: int = 1) -> list[dict[str, object]]:
    generator = torch.Generator().manual_seed(0)
    groups: list[dict[str, object]] = []
    for number, algorithm in enumerate(["muon"] + ["adamw"] * num_adamw_groups):
        parameters = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((4, 3), (5,), (2, 2))]
        for parameter in parameters:
            parameter.grad = 10 * torch.randn(parameter.shape, generator=generator)
        groups.append(
            {
                "params": parameters,
                "param_names": [f"{algorithm}.{number}.{i}" for i in range(3)],
                "algorithm": algorithm,
                "weight_decay": 0.1 if number == 1 else 0.0,
            }
        )
    return groups


def test_norms_of_each_group_are_torch_s() -> None:
    groups = _groups()
    verdict = judge_window(view_groups(groups), torch.tensor(2.5), stop=False)
    assert verdict.accepted
    assert verdict.loss == 2.5
    assert not verdict.stop
    for group in groups:
        expected = torch.nn.utils.get_total_norm([p.grad for p in group["params"]])  # type: ignore[attr-defined]
        assert verdict.gradient_norms[str(group["algorithm"])] == pytest.approx(expected.item(), rel=1e-6)


def test_groups_that_share_an_algorithm_have_labels_of_their_own() -> None:
    assert [view.label for view in view_groups(_groups(2))] == ["muon", "adamw_decay", "adamw_no_decay"]
    assert [view.label for view in view_groups(_groups(3))] == ["muon", "adamw_0", "adamw_1", "adamw_2"]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_bad_element_rejects_the_window_and_is_named(bad: float) -> None:
    groups = _groups()
    groups[1]["params"][1].grad[3] = bad  # type: ignore[index]
    verdict = judge_window(view_groups(groups), torch.tensor(2.5), stop=False)
    assert not verdict.accepted
    assert verdict.offender == "gradient of 'adamw.1.1' on rank 0"


def test_a_bad_loss_rejects_the_window() -> None:
    verdict = judge_window(view_groups(_groups()), torch.tensor(math.nan), stop=True)
    assert not verdict.accepted
    assert verdict.offender == "loss on rank 0"
    assert verdict.stop


def test_huge_finite_gradients_are_accepted() -> None:
    groups = _groups()
    groups[0]["params"][0].grad.fill_(3e38)  # type: ignore[index]
    verdict = judge_window(view_groups(groups), torch.tensor(1.0), stop=False)
    assert verdict.accepted
    assert verdict.gradient_norms["muon"] == pytest.approx(3e38 * math.sqrt(12), rel=1e-5)


def test_judging_changes_nothing_and_absent_gradients_do_not_count() -> None:
    groups = _groups()
    groups[0]["params"][0].grad = None  # type: ignore[index]
    before = [p.grad.clone() for group in groups for p in group["params"] if p.grad is not None]  # type: ignore[attr-defined]
    assert judge_window(view_groups(groups), torch.tensor(1.0), stop=False).accepted
    after = [p.grad for group in groups for p in group["params"] if p.grad is not None]  # type: ignore[attr-defined]
    for old, new in zip(before, after, strict=True):
        torch.testing.assert_close(new, old, rtol=0, atol=0)


@pytest.mark.parametrize("num_adamw_groups", [1, 2])
def test_clipping_is_torch_s_on_adamw_alone(num_adamw_groups: int) -> None:
    groups, reference = _groups(num_adamw_groups), _groups(num_adamw_groups)
    views = view_groups(groups)
    verdict = judge_window(views, torch.tensor(1.0), stop=False)
    factor = clip_gradients(views, verdict, 1.0)
    assert 0 < factor < 1
    clipped = [p for group in reference[1:] for p in group["params"]]  # type: ignore[attr-defined]
    torch.nn.utils.clip_grad_norm_(clipped, 1.0)
    for group, expected in zip(groups, reference, strict=True):
        for p, q in zip(group["params"], expected["params"], strict=True):  # type: ignore[call-overload]
            tolerance = 0.0 if group["algorithm"] == "muon" else 1e-6
            torch.testing.assert_close(p.grad, q.grad, rtol=tolerance, atol=0)


def test_small_gradients_and_no_limit_are_left_alone() -> None:
    for limit in (1e6, None):
        groups, reference = _groups(), _groups()
        views = view_groups(groups)
        assert clip_gradients(views, judge_window(views, torch.tensor(1.0), stop=False), limit) == 1.0
        for p, q in zip(groups[1]["params"], reference[1]["params"], strict=True):  # type: ignore[call-overload]
            torch.testing.assert_close(p.grad, q.grad, rtol=0, atol=0)


def test_update_norms() -> None:
    groups = _groups()
    norms = UpdateNorms(view_groups(groups), CPU)
    norms.remember()
    with torch.no_grad():
        groups[0]["params"][0].add_(0.5)  # type: ignore[index]
    assert norms.measure() == {"muon": pytest.approx(0.5 * math.sqrt(12), rel=1e-6), "adamw": 0.0}
