"""Where the processes of a run meet: MASTER_ADDR and MASTER_PORT.

What is wrong with them is found before anybody waits there. Waiting is done in Python, so that
signal handlers run, the time-out holds, and torch's log of each failed attempt stays out of sight.
"""

import contextlib
import datetime
import ipaddress
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Sequence

from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]  # not in its stubs

from omn_dist.settings import SettingsError

_POLL_SECONDS = 0.1
_ATTEMPT_SECONDS = 2.0
_CONNECT_SECONDS = 10.0
_LAST_PORT = 65_535


class MeetingPointError(SettingsError):
    """Address, port or numbers of ranks are wrong, so that this process cannot meet the others."""


class MissingMembersError(RuntimeError):
    """Processes of the run did not come to the meeting point in time."""


def is_loopback(address: str) -> bool:
    """Whether an address means, on every machine, that machine itself."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    return parsed.is_loopback or parsed.is_unspecified


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
    with socket.socket(_family(address), socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))
        except OSError:
            return None
        return str(probe.getsockname()[0])


def is_own(address: str) -> bool:
    """Whether ``address`` is one of this machine's."""
    with socket.socket(_family(address), socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def leads_here(address: str, port: int) -> bool:
    """Whether a connection to ``address`` arrives at this machine, as behind a forwarded port."""
    token = secrets.token_bytes(16)
    try:
        with _listener(port) as server, socket.create_connection((address, port), timeout=_ATTEMPT_SECONDS) as client:
            client.sendall(token)
            server.settimeout(_ATTEMPT_SECONDS)
            while True:  # another process of the run may connect too
                with server.accept()[0] as arrived:
                    arrived.settimeout(_ATTEMPT_SECONDS)
                    if arrived.recv(len(token)) == token:
                        return True
    except OSError:
        return False


def why_not_free(port: int) -> str | None:
    """Why no server on this machine can listen on ``port``, on all its addresses, or ``None``."""
    both = socket.has_dualstack_ipv6()
    with socket.socket(socket.AF_INET6 if both else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if both:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        try:
            # Bound and not opened: a process that looks for the real server must not find this one.
            probe.bind(("", port))
        except OSError as error:
            return os.strerror(error.errno or 0)
    return None


def _listener(port: int) -> socket.socket:
    both = socket.has_dualstack_ipv6()
    return socket.create_server(("", port), family=socket.AF_INET6 if both else socket.AF_INET, dualstack_ipv6=both)


def parse_port(text: str, *, last: int = _LAST_PORT) -> int:
    """The number of a port.

    Raises:
        MeetingPointError: no whole number from 1 to ``last``.
    """
    if not re.fullmatch(r"[0-9]{1,5}", text) or not 1 <= int(text) <= last:
        raise MeetingPointError(f"MASTER_PORT: found {text!r}, expected a port from 1 to {last}; set it to the same one everywhere")
    return int(text)


def check_address(host: str, addresses: Sequence[str], num_machines: int) -> list[str]:
    """Check that the address of the first machine leads to the same machine from everywhere.

    Args:
        host: the address or name, as it was given.
        addresses: addresses that it resolves to on this machine.
        num_machines: number of machines of the run.

    Returns:
        One line for each problem.
    """
    if not addresses:
        return [f"MASTER_ADDR: {host!r} resolves to no address, expected the first machine's name or address; correct it"]
    loopback = [address for address in addresses if is_loopback(address)]
    if num_machines > 1 and loopback:
        return [
            f"MASTER_ADDR: {host!r} is {loopback[0]} here, an address that every machine has for itself, expected one that "
            f"leads to the first of {num_machines} machines; give its address on the network that connects them"
        ]
    return []


def check_route(host: str, addresses: Sequence[str], port: int, *, is_first: bool) -> list[str]:
    """Check that MASTER_ADDR leads to the first machine, and that the others have a route.

    Args:
        host: the address or name, as it was given.
        addresses: addresses that it resolves to on this machine.
        port: port of the meeting.
        is_first: whether this machine is the first one.

    Returns:
        One line for each problem. Takes up to a few seconds.
    """
    if any(map(is_own, addresses)):
        return []
    if not is_first:
        if any(map(source_address, addresses)):
            return []
        return [
            f"MASTER_ADDR: {host!r} is {addresses[0]}, to which this machine has no route, expected an address on a network that "
            "it is connected to; correct it"
        ]
    if any(leads_here(address, port) for address in addresses):
        return []
    return [
        f"MASTER_ADDR: {host!r} is {addresses[0]}, which is no address of {socket.gethostname()}, and port {port} there does not "
        "lead here, expected an address of this machine, since it is the first one of the run; correct MASTER_ADDR, or the "
        "numbers of the machines"
    ]


def open_store(address: str, port: int, *, serve: bool, deadline: float, timeout: datetime.timedelta) -> TCPStore:
    """The store at the meeting point.

    Args:
        address: name or address of the machine that serves it.
        port: its port.
        serve: whether this process serves it.
        deadline: of ``time.monotonic()``, until which this process waits for the server.
        timeout: of later operations on the store.

    Raises:
        MeetingPointError: this process is to serve, and cannot listen on the port.
        MissingMembersError: nobody has served it before the deadline.
    """
    if serve:
        reason = why_not_free(port)
        if reason is not None:
            raise MeetingPointError(
                f"MASTER_PORT: found {port}, on which {socket.gethostname()} cannot listen ({reason}), expected a free port; "
                "set it to another one everywhere"
            )
    answered = serve
    while time.monotonic() < deadline:
        answered = answered or _answers(address, port, deadline)
        store = _connect(address, port, serve, deadline) if answered else None
        if store is not None:
            store.set_timeout(timeout)
            return store
    raise MissingMembersError(
        f"what listens at {address}:{port} is another program"
        if answered
        else f"nobody listens at {address}:{port}{_hint(address)}"
    )


def _connect(address: str, port: int, serve: bool, deadline: float) -> TCPStore | None:
    found: list[TCPStore] = []

    def connect() -> None:
        # torch waits longer between its attempts, the longer its time-out is.
        timeout = datetime.timedelta(seconds=_CONNECT_SECONDS)
        with contextlib.suppress(DistError, RuntimeError, ValueError):
            found.append(TCPStore(address, port, is_master=serve, wait_for_workers=False, timeout=timeout))

    # A thread: torch waits without end for a program that accepts and says nothing.
    thread = threading.Thread(target=connect, daemon=True)
    with _without_messages():
        thread.start()
        while thread.is_alive() and time.monotonic() < deadline:
            thread.join(_POLL_SECONDS)
    return found[0] if found else None


def _answers(address: str, port: int, deadline: float) -> bool:
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection((address, port), timeout=_ATTEMPT_SECONDS):
            return True
        time.sleep(_POLL_SECONDS)
    return False


def _hint(address: str) -> str:
    """A common cause: every machine was given its own address."""
    own = any(is_own(found) for found in resolve(address))
    return ", an address of this very machine" if own else ""


@contextlib.contextmanager
def _without_messages() -> Iterator[None]:
    """Discard what is written to standard error: torch's log cannot be switched off by itself."""
    with open(os.devnull, "w") as nowhere:
        kept = os.dup(2)
        os.dup2(nowhere.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)
