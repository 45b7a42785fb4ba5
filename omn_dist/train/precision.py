"""Precision: the dtype of the forward pass, and how precise CUDA kernels must be.

CUDA kernels may use TF32 in matrix products, TF32 in cuDNN, and reduced precision in bf16
reductions. All three are on by default and off under ``deterministic``. The run record holds what
torch reports after they were set.
"""

import contextlib
import dataclasses
import os
from typing import Any, Literal

import torch


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Dtype of the forward pass, and whether kernels are deterministic."""

    autocast: Literal["bfloat16", "none"] = "none"
    """Dtype of products in forward and backward. Parameters, gradients and state stay fp32."""
    deterministic: bool = False
    """Switch off TF32 and reduced-precision reductions, and use torch's deterministic kernels."""


def apply_precision(config: PrecisionConfig) -> dict[str, Any]:
    """Set torch's global switches from ``config``, and return what torch reports afterwards.

    Call it before the first CUDA kernel, because cuBLAS reads its workspace setting only once.
    """
    permitted = not config.deterministic
    torch.backends.cuda.matmul.allow_tf32 = permitted
    torch.backends.cudnn.allow_tf32 = permitted
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = permitted
    if config.deterministic:
        # cuBLAS is reproducible with a fixed workspace only, and torch refuses it without one.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(config.deterministic)
    return effective_policy(config)


def effective_policy(config: PrecisionConfig) -> dict[str, Any]:
    """The settings in force, as torch reports them; JSON types."""
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
    """The context for every forward pass: autocast to the configured dtype, or nothing."""
    if config.autocast == "none":
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)
