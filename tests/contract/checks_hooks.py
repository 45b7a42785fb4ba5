"""Hooks around state_dict and load_state_dict."""

from copy import deepcopy
from typing import Any

import torch
from checks_state import copied
from contract_registry import check
from contract_subjects import Subject, assert_equal, bits, steps


@check()
def hooks_of_state_dict_run_before_and_after(subject: Subject) -> None:
    _, optimizer = subject.make()
    seen: list[str] = []

    def before(found: torch.optim.Optimizer) -> None:
        assert found is optimizer
        seen.append("before")
        for group in found.param_groups:
            group["lr"] = 0.75

    def first(found: torch.optim.Optimizer) -> None:
        seen.append("first")

    def after(found: torch.optim.Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
        seen.append("after")
        return {**saved, "of the program": 1}

    handles = [optimizer.register_state_dict_pre_hook(before), optimizer.register_state_dict_pre_hook(first, prepend=True)]
    handles.append(optimizer.register_state_dict_post_hook(after))
    saved = optimizer.state_dict()
    assert seen == ["first", "before", "after"]
    assert saved["of the program"] == 1
    assert all(group["lr"] == 0.75 for group in saved["param_groups"])
    for handle in handles:
        handle.remove()
    assert "of the program" not in optimizer.state_dict()
    assert len(seen) == 3


@check()
def hooks_of_load_state_dict_run_before_and_after(subject: Subject) -> None:
    _, optimizer = subject.make()
    steps(optimizer, 0)
    twin = copied(subject, optimizer)
    seen: list[str] = []

    def change(found: torch.optim.Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
        seen.append("change")
        saved = deepcopy(saved)
        for group in saved["param_groups"]:
            group["lr"] = 0.75
        return saved

    def first(found: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
        seen.append("first")

    def after(found: torch.optim.Optimizer) -> None:
        seen.append("after")
        assert all(group["lr"] == 0.75 for group in found.param_groups)
        loaded.append(bits(found))

    loaded: list[dict[str, Any]] = []
    handles = [twin.register_load_state_dict_pre_hook(change), twin.register_load_state_dict_pre_hook(first, prepend=True)]
    handles.append(twin.register_load_state_dict_post_hook(after))
    twin.load_state_dict(optimizer.state_dict())
    assert seen == ["first", "change", "after"]
    assert_equal(bits(optimizer), loaded[0])
    for handle in handles:
        handle.remove()
    twin.load_state_dict(optimizer.state_dict())
    assert len(seen) == 3


@check()
def a_hook_may_mend_what_would_not_load(subject: Subject) -> None:
    _, optimizer = subject.make()
    steps(optimizer, 0)
    saved = deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["param_names"] = [f"module.{name}" for name in saved["param_groups"][0]["param_names"]]
    saved["param_groups"].append({"params": [99], "param_names": ["old"]})
    twin = copied(subject, optimizer)

    def mend(found: torch.optim.Optimizer, given: dict[str, Any]) -> dict[str, Any]:
        groups = deepcopy(given["param_groups"][:-1])
        groups[0]["param_names"] = [name.removeprefix("module.") for name in groups[0]["param_names"]]
        return {**given, "param_groups": groups}

    twin.register_load_state_dict_pre_hook(mend)
    twin.load_state_dict(saved)
    assert_equal(bits(optimizer), bits(twin))


@check()
def a_hook_after_loading_may_change_state(subject: Subject) -> None:
    _, optimizer = subject.make()
    steps(optimizer, 0)
    twin = copied(subject, optimizer)

    def clear(found: torch.optim.Optimizer) -> None:
        for state in found.state.values():
            for value in state.values():
                value.zero_()

    twin.register_load_state_dict_post_hook(clear)
    twin.load_state_dict(optimizer.state_dict())
    assert all(not value.any() for key, value in bits(twin).items() if "." in key)
