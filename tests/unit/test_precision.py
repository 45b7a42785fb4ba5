import os
from collections.abc import Iterator

import pytest
import torch

from omn_dist.train.precision import PrecisionConfig, apply_precision, effective_policy, forward_context


@pytest.fixture(autouse=True)
def _restore_switches(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ":4096:8"))
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = (matmul.allow_tf32, cudnn.allow_tf32, matmul.allow_bf16_reduced_precision_reduction, cudnn.benchmark)
    yield
    matmul.allow_tf32, cudnn.allow_tf32, matmul.allow_bf16_reduced_precision_reduction, cudnn.benchmark = before
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("deterministic", [False, True])
def test_one_flag_governs_all_permissions(deterministic: bool) -> None:
    policy = apply_precision(PrecisionConfig(deterministic=deterministic))
    for switch in ("matmul_tf32", "cudnn_tf32", "bf16_reduced_precision_reduction"):
        assert policy[switch] is not deterministic
    assert policy["deterministic_algorithms"] is deterministic
    assert torch.are_deterministic_algorithms_enabled() is deterministic
    assert torch.backends.cuda.matmul.allow_tf32 is not deterministic


def test_the_policy_is_what_torch_reports_not_what_was_asked() -> None:
    apply_precision(PrecisionConfig(deterministic=True))
    torch.backends.cuda.matmul.allow_tf32 = True
    assert effective_policy(PrecisionConfig(deterministic=True))["matmul_tf32"] is True


@pytest.mark.parametrize(("autocast", "expected"), [("none", torch.float32), ("bfloat16", torch.bfloat16)])
def test_forward_dtype(autocast: str, expected: torch.dtype) -> None:
    with forward_context(PrecisionConfig(autocast=autocast), torch.device("cpu")):  # type: ignore[arg-type]
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is expected
