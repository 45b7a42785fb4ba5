"""Metrics of a run as JSON lines: one row a step, a validation, or a rejected window.

Rows carry ``kind`` (``train``, ``validation`` or ``rejected``) and ``window``, the number of windows read when the row
was written. A resumed run first drops the rows of windows after its checkpoint, so each step is in the file once.
"""

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from omn_dist.settings import SettingsError

Row = dict[str, Any]


def read_rows(path: Path) -> list[Row]:
    """All rows of a metrics file; a last line that a killed run left unfinished is not a row.

    Raises:
        SettingsError: a line before the last one is no JSON object.
    """
    rows: list[Row] = []
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            row = None
        if isinstance(row, dict):
            rows.append(row)
        elif number < len(lines):
            raise SettingsError(f"{path} line {number}: found no JSON object, expected one row a line; repair or move it")
    return rows


def write_durably(path: Path, text: str) -> None:
    """Replace ``path`` by ``text`` atomically: after a crash the file holds the old content or the new, never a part."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make renames inside ``folder`` durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class MetricsFile:
    """Appends rows to a JSON-lines file.

    Args:
        path: the file; rows of windows after ``resumed_window`` that it holds are dropped.
        resumed_window: windows read by the checkpoint that the run continues; ``None`` starts an empty file.
    """

    def __init__(self, path: Path, *, resumed_window: int | None) -> None:
        kept = [] if resumed_window is None else [row for row in read_rows(path) if row["window"] <= resumed_window]
        write_durably(path, "".join(_line(row) for row in kept))
        self._file = path.open("a", encoding="utf-8")

    def append(self, row: Mapping[str, Any]) -> None:
        """Write a row and hand it to the operating system."""
        self._file.write(_line(row))
        self._file.flush()

    def sync(self) -> None:
        """Make the rows durable; a checkpoint calls this first, so that it never knows of steps without rows."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Make the rows durable and close the file."""
        self.sync()
        self._file.close()


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(_finite(row), allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    """``value`` with null for numbers that JSON does not have."""
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


class GpuMeter:
    """Memory, utilisation and power of one GPU through NVML. Made for CUDA devices only."""

    def __init__(self, device: torch.device) -> None:
        import pynvml

        pynvml.nvmlInit()
        self._nvml = pynvml
        self._device = device
        # By identity: NVML counts all devices of the machine, torch those that CUDA_VISIBLE_DEVICES leaves.
        uuid = torch.cuda.get_device_properties(device).uuid
        self._handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")

    def read(self) -> Row:
        """The device now; a value that the device does not report is null."""
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
    """A meter for a CUDA device, or ``None`` with the reason why there is none; for a CPU there is neither."""
    if device.type != "cuda":
        return None, None
    try:
        return GpuMeter(device), None
    except Exception as error:  # NVML's errors have no base class that exists without the driver
        return None, f"GPU readings are off: {error}"


def draw_loss_curve(rows: Iterable[Mapping[str, Any]], path: Path) -> bool:
    """Draw training and validation loss against accepted tokens into a PNG.

    Returns:
        False where matplotlib is not installed; nothing is written then.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    rows = list(rows)
    figure = Figure(figsize=(8, 5), dpi=120, layout="constrained")
    axes = figure.subplots()
    for kind, style in (("train", {"linewidth": 0.8, "alpha": 0.7}), ("validation", {"marker": "o", "markersize": 3})):
        of_kind = [row for row in rows if row["kind"] == kind and row["loss"] is not None]
        points = [(row["tokens"], row["loss"]) for row in of_kind]
        if points:
            axes.plot(*zip(*points, strict=True), label=kind, **style)
    axes.set_xlabel("accepted tokens")
    axes.set_ylabel("cross-entropy (nats per token)")
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend()
    partial = path.with_name(path.name + ".partial")
    figure.savefig(partial, format="png")
    partial.replace(path)
    return True
