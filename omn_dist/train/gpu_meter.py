"""Memory, utilisation and power of a GPU, read through NVML."""

from typing import Any

import torch


class GpuMeter:
    """Reads one GPU.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        import pynvml

        pynvml.nvmlInit()
        self._nvml = pynvml
        self._device = device
        # By UUID: NVML numbers all GPUs of the machine, torch only those that
        # CUDA_VISIBLE_DEVICES leaves.
        uuid = torch.cuda.get_device_properties(device).uuid
        self._handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")

    def read(self) -> dict[str, Any]:
        """The current readings by name; ``None`` where the GPU does not report a value."""
        nvml = self._nvml
        return {
            "memory_bytes_used": self._ask(lambda: int(nvml.nvmlDeviceGetMemoryInfo(self._handle).used)),
            "memory_bytes_peak_allocated": torch.cuda.max_memory_allocated(self._device),
            "utilisation_percent": self._ask(lambda: int(nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu)),
            "power_watts": self._ask(lambda: nvml.nvmlDeviceGetPowerUsage(self._handle) / 1000),
        }

    def _ask(self, question: Any) -> Any:
        try:
            return question()
        except self._nvml.NVMLError:
            return None


def open_gpu_meter(device: torch.device) -> tuple[GpuMeter | None, str | None]:
    """A meter for a CUDA device, or ``None`` and the reason. A CPU gives ``(None, None)``."""
    if device.type != "cuda":
        return None, None
    try:
        return GpuMeter(device), None
    except Exception as error:  # NVML's errors have no base class that exists without the driver
        return None, f"GPU readings are off: {error}"
