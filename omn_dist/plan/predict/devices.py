"""Devices and networks as data: the numbers from which times are predicted."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from omn_dist.settings import SettingsError, unknown_name


@dataclass(frozen=True, kw_only=True)
class Topology:
    """How ranks are connected.

    Bandwidths are those that collectives reach, of one rank in one direction, in bytes a second.
    """

    ranks_per_node: int
    """Ranks with consecutive numbers that share a node."""
    inside_bytes_per_second: float
    """Between ranks of one node."""
    between_bytes_per_second: float
    """Between nodes."""
    latency_seconds: float
    """Of one collective over two ranks; it grows with the logarithm of their number."""

    def exchange_seconds(self, num_bytes: float, world_size: int) -> float:
        """Seconds of an all-to-all in which the busiest rank sends or receives ``num_bytes``.

        Its messages to all other ranks are of equal size.
        """
        if world_size < 2:
            return 0.0
        inside = min(self.ranks_per_node, world_size) - 1
        share = inside / (world_size - 1)
        # Both networks work at the same time.
        slower = max(share / self.inside_bytes_per_second, (1 - share) / self.between_bytes_per_second)
        return self.latency_seconds * math.ceil(math.log2(world_size)) + num_bytes * slower


@dataclass(frozen=True, kw_only=True)
class Device:
    """What one rank computes with. Rates are those that matrix products reach."""

    name: str
    float32_flops_per_second: float
    """Large products of fp32 matrices; on GPUs with TF32, as in the default precision policy."""
    bfloat16_flops_per_second: float
    """Large products of bf16 matrices."""
    half_rate_side: float
    """The short side at which products run at half their rate."""
    memory_bytes_per_second: float
    """Elementwise work: bytes read and written."""
    launch_seconds: float
    """Host time of one kernel or small operation."""
    view_seconds: float = 0.0
    """Host time of a call that makes a view; 0 where the host runs ahead of its device."""
    overlaps: bool = True
    """Whether communication and computation overlap. On CPUs both need the same cores."""
    ranks_per_core: float = 1.0
    """CPU ranks that share a core. Rates are those with all of them busy."""
    fused_adamw: bool = True
    """Whether AdamW goes through memory once, or once for each of its operations."""
    topology: Topology
    """The network that usually comes with it."""
    source: str = ""
    """Where the numbers come from."""

    def matmul_rate(self, short_side: int, itemsize: int) -> float:
        """FLOPs a second of products with this short side, for elements of 4 or 2 bytes."""
        rate = self.float32_flops_per_second if itemsize >= 4 else self.bfloat16_flops_per_second
        return rate * short_side / (short_side + self.half_rate_side)


# What large products reach of a data sheet's dense rate, and what kernels and collectives reach of
# its memory and network bandwidths.
_MATMUL_SHARE = 0.7
_MEMORY_SHARE = 0.8
_NETWORK_SHARE = 0.8


def _gpu(name: str, tf32: float, bf16: float, memory: float, nvlink: float, network: float, source: str) -> Device:
    """A GPU from its data sheet.

    ``tf32`` and ``bf16`` in dense TFLOP/s, ``memory`` in TB/s, ``nvlink`` and ``network`` in GB/s
    in one direction.
    """
    return Device(
        name=name,
        float32_flops_per_second=tf32 * 1e12 * _MATMUL_SHARE,
        bfloat16_flops_per_second=bf16 * 1e12 * _MATMUL_SHARE,
        half_rate_side=512,
        memory_bytes_per_second=memory * 1e12 * _MEMORY_SHARE,
        launch_seconds=4e-6,
        topology=Topology(
            ranks_per_node=8,
            inside_bytes_per_second=nvlink * 1e9 * _NETWORK_SHARE,
            between_bytes_per_second=network * 1e9 * _NETWORK_SHARE,
            latency_seconds=15e-6,
        ),
        source=f"{source}; 70 % of the dense product rate, 80 % of bandwidths, launch, latency and half_rate_side assumed",
    )


DEVICES: Mapping[str, Device] = MappingProxyType(
    {
        "a100": _gpu("a100", 156, 312, 2.039, 300, 25, "NVIDIA A100 80GB SXM data sheet, 200 Gb/s a GPU"),
        "h100": _gpu("h100", 495, 989, 3.35, 450, 50, "NVIDIA H100 SXM data sheet, 400 Gb/s a GPU"),
        "h200": _gpu("h200", 495, 989, 4.8, 450, 50, "NVIDIA H200 SXM data sheet, 400 Gb/s a GPU"),
        "b200": _gpu("b200", 1100, 2250, 8.0, 900, 50, "NVIDIA HGX B200 data sheet, 400 Gb/s a GPU"),
        "cpu": Device(
            name="cpu",
            float32_flops_per_second=1.1e11,
            bfloat16_flops_per_second=4.5e11,
            half_rate_side=64,
            memory_bytes_per_second=8e9,
            launch_seconds=3e-6,
            view_seconds=3e-6,
            overlaps=False,
            topology=Topology(
                ranks_per_node=64, inside_bytes_per_second=1.5e9, between_bytes_per_second=1.2e9, latency_seconds=2e-4
            ),
            source="one core with AVX-512 and bf16 instructions, gloo inside one machine; calibrate for any other",
        ),
    }
)


def device_by_name(name: str) -> Device:
    """The profile of that name; raises ``SettingsError`` with the nearest known one."""
    if name not in DEVICES:
        raise SettingsError(unknown_name("device profile", name, DEVICES))
    return DEVICES[name]
