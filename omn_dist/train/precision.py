"""The precision policy: which shortcuts the matrix kernels may take, and the dtype of the forward pass.

One flag governs the three permissions of CUDA kernels (TF32 in matrix products, TF32 in cuDNN, reduced precision in
bf16 reductions): permitted by default, off under ``deterministic``. What torch then reports goes to the run record.
"""

import contextlib
import dataclasses
import os
from typing import Any, Literal

import torch


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Dtype of the forward pass and the deterministic flag."""

    autocast: Literal["bfloat16", "none"] = "none"
    """Dtype of the products in forward and backward; parameters, gradients and state stay fp32."""
    deterministic: bool = False
    """Forbid TF32 and reduced-precision reductions and ask torch for deterministic kernels."""


def apply_precision(config: PrecisionConfig) -> dict[str, Any]:
    """Set torch's global switches from ``config`` and return the policy as torch reports it afterwards.

    Call before the first CUDA kernel: cuBLAS reads its workspace setting once.
    """
    permitted = not config.deterministic
    torch.backends.cuda.matmul.allow_tf32 = permitted
    torch.backends.cudnn.allow_tf32 = permitted
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = permitted
    if config.deterministic:
        # cuBLAS is only reproducible with a fixed workspace; torch refuses its products otherwise.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(config.deterministic)
    return effective_policy(config)


def effective_policy(config: PrecisionConfig) -> dict[str, Any]:
    """The policy in force, read back from torch; JSON-able."""
    return {
        "autocast": config.autocast,
        "deterministic": config.deterministic,
        "matmul_tf32": torch.backends.cuda.matmul.allow_tf32,
        "cudnn_tf32": torch.backends.cudnn.allow_tf32,
        "bf16_reduced_precision_reduction": torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
    }


def forward_context(config: PrecisionConfig, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """The context around every forward pass: autocast to the configured dtype, or nothing."""
    if config.autocast == "none":
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)
