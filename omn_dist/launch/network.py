"""The network of this machine: interfaces and free ports."""

import dataclasses
import fcntl
import socket
import struct

from omn_dist.settings import SettingsError
from omn_dist.train.meeting_point import is_loopback, why_not_free

# Requests of Linux's netdevice(7), and one of its flags.
_GET_FLAGS, _GET_ADDRESS = 0x8913, 0x8915
_IS_UP = 0x1

_FIRST_PORT, _NUM_PORTS = 20_000, 10_000
_TRIES = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Interface:
    """A network interface."""

    name: str
    """Such as ``eth0``; a value of ``GLOO_SOCKET_IFNAME`` and ``NCCL_SOCKET_IFNAME``."""
    address: str | None
    """Its IPv4 address, if it has one."""
    is_up: bool
    """Whether it is switched on."""

    @property
    def is_loopback(self) -> bool:
        """Whether it leads to this machine only."""
        return self.address is not None and is_loopback(self.address)


def list_interfaces() -> tuple[Interface, ...]:
    """The interfaces of this machine, in the system's order."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        return tuple(
            Interface(name=name, address=_ipv4_address(probe, name), is_up=_is_up(probe, name)) for _, name in socket.if_nameindex()
        )


def _request(probe: socket.socket, request: int, name: str) -> bytes:
    return fcntl.ioctl(probe.fileno(), request, struct.pack("256s", name.encode()[:15]))


def _ipv4_address(probe: socket.socket, name: str) -> str | None:
    try:
        return socket.inet_ntoa(_request(probe, _GET_ADDRESS, name)[20:24])
    except OSError:  # it has none
        return None


def _is_up(probe: socket.socket, name: str) -> bool:
    flags: int = struct.unpack("16xH", _request(probe, _GET_FLAGS, name)[:18])[0]
    return bool(flags & _IS_UP)


def port_of_job(job: int) -> int:
    """The port that a SLURM job tries first.

    Jobs on the same machine have numbers close together, and so different ports.
    """
    return _FIRST_PORT + job % _NUM_PORTS


def next_free_port(first: int) -> int:
    """``first``, or the next port after it that is free.

    Raises:
        SettingsError: many ports in a row are taken.
    """
    for port in range(first, min(first + _TRIES, 65_536)):
        if why_not_free(port) is None:
            return port
    raise SettingsError(
        f"port: found {first} to {first + _TRIES - 1} taken on {socket.gethostname()}, expected a free one; set MASTER_PORT"
    )
