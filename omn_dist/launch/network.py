"""The network of this machine: interfaces, addresses of names, free ports."""

import dataclasses
import fcntl
import ipaddress
import socket
import struct

from omn_dist.settings import SettingsError

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


def is_loopback(address: str) -> bool:
    """Whether an address means, on every machine, that machine itself."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    return parsed.is_loopback or parsed.is_unspecified


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


def resolve(host: str) -> tuple[str, ...]:
    """The addresses of the name ``host`` on this machine; none if the name is unknown."""
    try:
        return tuple(dict.fromkeys(str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)))
    except (OSError, UnicodeError):
        return ()


def source_address(address: str) -> str | None:
    """The address from which this machine would send to ``address``, if it can. Sends nothing.

    Other machines on that network can reach this machine there.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))
        except OSError:
            return None
        return str(probe.getsockname()[0])


def port_of_job(job: int) -> int:
    """The port that a SLURM job tries first.

    Jobs on the same machine have numbers close together, and so different ports.
    """
    return _FIRST_PORT + job % _NUM_PORTS


def is_free(port: int) -> bool:
    """Whether a server on this machine can listen on ``port``, on all its addresses."""
    with socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if probe.family == socket.AF_INET6:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        try:
            probe.bind(("", port))
            probe.listen(1)
        except OSError:
            return False
    return True


def next_free_port(first: int) -> int:
    """``first``, or the next port after it that is free.

    Raises:
        SettingsError: many ports in a row are taken.
    """
    for port in range(first, min(first + _TRIES, 65_536)):
        if is_free(port):
            return port
    raise SettingsError(
        f"port: found {first} to {first + _TRIES - 1} taken on {socket.gethostname()}, expected a free one; set MASTER_PORT"
    )
