"""Two hosts on one kernel, joined by a cable of a given rate: network namespaces of their own, one end of a veth pair in each.

Namespaces, cable and limits go away with the processes that live in them, however those end.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

INTERFACE = "fabric0"
ADDRESSES = ("10.213.9.1", "10.213.9.2")


def why_not() -> str | None:
    """Why hosts cannot be made here, or ``None``."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [program for program in ("ip", "tc", "unshare", "nsenter", "setpriv") if shutil.which(program) is None]
    if missing:
        return f"found no {', '.join(missing)}, expected the commands of iproute2 and util-linux"
    trial = f"ip link add {INTERFACE} type veth peer name trial && {_limit('1gbit')}"
    answer = subprocess.run(["unshare", "--net", "sh", "-c", trial], capture_output=True, text=True)
    return f"no network namespaces here: {answer.stderr.strip()}" if answer.returncode else None


@contextmanager
def two_hosts(rate: str) -> Iterator[Sequence[Sequence[str]]]:
    """For each host the start of a command that runs there; what it runs dies with the process that started it."""
    with ExitStack() as stack:
        numbers = []
        for _ in ADDRESSES:
            # It ends when its input is closed: with this process at the latest. Its answer says that the namespace is there.
            holder = subprocess.Popen(
                ["unshare", "--net", "sh", "-c", "echo; exec cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            stack.enter_context(holder)
            assert holder.stdout is not None
            holder.stdout.readline()
            numbers.append(str(holder.pid))
        hosts = [["setpriv", "--pdeathsig", "KILL", "nsenter", "-t", number, "-n"] for number in numbers]
        cable = ["ip", "link", "add", INTERFACE, "type", "veth", "peer", "name", INTERFACE, "netns", numbers[1]]
        subprocess.run([*hosts[0], *cable], check=True)
        for host, address in zip(hosts, ADDRESSES, strict=True):
            up = f"ip link set lo up && ip address add {address}/24 dev {INTERFACE} && ip link set {INTERFACE} up"
            subprocess.run([*host, "sh", "-c", f"{up} && {_limit(rate)}"], check=True)
        yield hosts


def _limit(rate: str) -> str:
    """Token bucket: what the interface sends keeps to ``rate``; what would wait longer than the latency is dropped."""
    return f"tc qdisc add dev {INTERFACE} root tbf rate {rate} burst 256kb latency 50ms"
