"""Two hosts on one machine with a network of a given rate between them.

Each host is a network namespace; the ends of a veth pair connect them. The kernel removes
namespaces, veth pair and rate limits when their processes end, in whatever way.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

INTERFACE = "fabric0"
ADDRESSES = ("10.213.9.1", "10.213.9.2")


def why_not() -> str | None:
    """The reason why this machine cannot make such hosts, or ``None``."""
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
    """For each host, the command prefix that runs a program there.

    A program ends with the process that started it.
    """
    with ExitStack() as stack:
        numbers = []
        for _ in ADDRESSES:
            # It prints a line once the namespace exists, and ends when its input is closed, at the
            # latest when this process ends.
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
    """A token bucket that limits sending to ``rate`` and drops packets that would wait > 50 ms."""
    return f"tc qdisc add dev {INTERFACE} root tbf rate {rate} burst 256kb latency 50ms"
