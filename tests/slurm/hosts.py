"""Two machines on one kernel, for tests.

Each host has its own namespaces for network, host name and mounts; a virtual cable connects them.
Each has a loopback, an interface ``fabric0`` and, as on Debian, a host name that resolves to a
loopback address on the host itself. Files are shared. A host ends with its processes.
"""

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

INTERFACE = "fabric0"
NAMES = ("n0", "n1")
ADDRESSES = ("10.213.7.1", "10.213.7.2")


def why_not() -> str | None:
    """Why hosts cannot be made here, or ``None``."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for program in ("unshare", "nsenter", "setpriv", "ip"):
        if shutil.which(program) is None:
            return f"network namespaces need the command {program} (Debian packages util-linux, iproute2)"
    trial = "ip link add trial0 type veth peer name trial1 && mount --bind /etc/hosts /etc/hosts"
    answer = subprocess.run(["unshare", "--net", "--uts", "--mount", "sh", "-c", trial], capture_output=True, text=True)
    return f"no network namespaces here: {answer.stderr.strip()}" if answer.returncode else None


class Host:
    """One of the machines."""

    def __init__(self, index: int, folder: Path) -> None:
        self.name, self.address = NAMES[index], ADDRESSES[index]
        # The namespaces exist as long as this process, which ends when its input is closed: with
        # the tests at the latest.
        self._holder = subprocess.Popen(["unshare", "--net", "--uts", "--mount", "cat"], stdin=subprocess.PIPE)
        while os.readlink(f"/proc/{self._holder.pid}/ns/mnt") == os.readlink("/proc/self/ns/mnt"):
            time.sleep(0.01)
        self.process_number = self._holder.pid
        table = folder / f"hosts_{self.name}"
        others = [f"{a} {n}" for n, a in zip(NAMES, ADDRESSES, strict=True) if n != self.name]
        table.write_text("\n".join(["127.0.0.1 localhost", f"127.0.1.1 {self.name}", *others]) + "\n")
        self.run("mount", "--bind", str(table), "/etc/hosts")
        self.run("hostname", self.name)
        self.run("ip", "link", "set", "lo", "up")

    def command(self, *command: str) -> list[str]:
        """The command that runs ``command`` on this host; it ends when its parent ends."""
        return ["setpriv", "--pdeathsig", "KILL", "nsenter", "-t", str(self.process_number), "-n", "-u", "-m", *command]

    def run(self, *command: str, env: Mapping[str, str] | None = None, seconds: float = 120, check: bool = True) -> str:
        """Run a command to its end; its output and messages."""
        answer = subprocess.run(
            self.command(*command), env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=seconds
        )
        assert answer.returncode == 0 or not check, f"{command} on {self.name}: {answer.returncode}\n{answer.stdout}"
        return answer.stdout

    def start(self, *command: str, **options: Any) -> "subprocess.Popen[str]":
        """Start a command."""
        return subprocess.Popen(self.command(*command), text=True, **options)

    def processes(self) -> list[int]:
        """Processes on this host, without the one that holds it; none when the host has ended."""
        try:
            own = os.readlink(f"/proc/{self.process_number}/ns/net")
        except FileNotFoundError:
            return []
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != self.process_number:
                try:
                    if os.readlink(entry / "ns/net") == own:
                        found.append(int(entry.name))
                except OSError:
                    continue
        return found

    def stop(self) -> None:
        """End everything on this host, and the host."""
        kill(self.processes())
        self._holder.stdin.close()  # type: ignore[union-attr]
        self._holder.wait(timeout=10)


class Hosts:
    """Both machines; a context manager."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="omn_hosts_"))
        self.hosts = tuple(Host(index, self.folder) for index in range(2))
        first, second = self.hosts
        first.run("ip", "link", "add", INTERFACE, "type", "veth", "peer", "name", INTERFACE, "netns", str(second.process_number))
        for host in self.hosts:
            host.run("ip", "address", "add", f"{host.address}/24", "dev", INTERFACE)
            host.run("ip", "link", "set", INTERFACE, "up")

    def __enter__(self) -> Sequence[Host]:
        return self.hosts

    def __exit__(self, *_: object) -> None:
        for host in self.hosts:
            host.stop()
        shutil.rmtree(self.folder, ignore_errors=True)


def kill(process_numbers: Sequence[int]) -> None:
    """``kill -9``."""
    for number in process_numbers:
        try:
            os.kill(number, 9)
        except ProcessLookupError:
            continue
