"""A real SLURM on two hosts of this machine: munged, slurmctld on the first, a slurmd on each."""

import os
import re
import secrets
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from hosts import Host, kill

TIMEOUT = 240.0
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel")

_CONFIGURATION = """
ClusterName=omn_test
SlurmctldHost={first.name}({first.address})
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=10
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldPort=16817
SlurmdPort=16818
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
SlurmdTimeout=10
SlurmctldTimeout=10
MinJobAge=600
KillWait=20
InactiveLimit=0
Waittime=0
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0
NodeName={first.name} NodeHostname={first.name} NodeAddr={first.address} CPUs=4
NodeName={second.name} NodeHostname={second.name} NodeAddr={second.address} CPUs=4
PartitionName=low Nodes=ALL Default=YES State=UP PriorityTier=1 GraceTime=60 MaxTime=60
PartitionName=high Nodes=ALL State=UP PriorityTier=10 PreemptMode=OFF MaxTime=60
"""


def why_not() -> str | None:
    """Why no cluster can be started here, or ``None``."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=search_path()) is None]
    return f"found no {', '.join(missing)} (Debian packages slurm-wlm, munge)" if missing else None


def search_path() -> str:
    """The path with the folders of daemons, which a user's own path may leave out."""
    return f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


def until(condition: Callable[[], bool], what: Callable[[], str], seconds: float = TIMEOUT) -> None:
    """Wait for ``condition``; ``what`` says what was there instead."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what()
        time.sleep(0.2)


class Cluster:
    """The cluster; a context manager. Its partition ``high`` preempts ``low`` after a minute.

    Args:
        hosts: two machines.
        environment: variables of the daemons and of the one who submits.
    """

    def __init__(self, hosts: Sequence[Host], environment: Mapping[str, str]) -> None:
        self.first, self.second = hosts
        self.folder = Path(tempfile.mkdtemp(prefix="omn_slurm_"))
        self.environment = dict(environment) | {"SLURM_CONF": str(self.folder / "slurm.conf")}
        self._daemons: dict[str, subprocess.Popen[str]] = {}

    def __enter__(self) -> "Cluster":
        for name in ("state", f"spool-{self.first.name}", f"spool-{self.second.name}"):
            (self.folder / name).mkdir()
        (self.folder / "slurm.conf").write_text(_CONFIGURATION.format(first=self.first, second=self.second, folder=self.folder))
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        self.folder.chmod(0o755)
        files = {name: str(self.folder / f"munge.{name}") for name in ("socket", "key", "log", "pid", "seed")}
        self._start(
            self.first, "munged", "--foreground", "--force", "--socket", files["socket"], "--key-file", files["key"],
            "--log-file", files["log"], "--pid-file", files["pid"], "--seed-file", files["seed"],
        )  # fmt: skip
        until(Path(files["socket"]).exists, self.logs)
        self._start(self.first, "slurmctld", "-D", "-f", self.environment["SLURM_CONF"])
        for host in (self.first, self.second):
            self.start_node(host)
        until(lambda: self.node_states() == ["idle", "idle"], lambda: f"{self.node_states()}\n{self.logs()}")
        return self

    def __exit__(self, *_: object) -> None:
        for daemon in reversed(self._daemons.values()):
            daemon.kill()
            daemon.wait(timeout=10)
        for host in (self.first, self.second):
            kill(host.processes())
        shutil.rmtree(self.folder, ignore_errors=True)

    def _start(self, host: Host, *command: str) -> None:
        with (self.folder / f"{command[0]}.out").open("a") as output:
            self._daemons[f"{command[0]} {host.name}"] = host.start(
                *command, env=self.environment, stdout=output, stderr=subprocess.STDOUT
            )

    def start_node(self, host: Host) -> None:
        """Start the slurmd of a host."""
        self._start(host, "slurmd", "-D", "-N", host.name, "-f", self.environment["SLURM_CONF"])

    def kill_node(self, host: Host) -> None:
        """Kill everything on the host at once."""
        self._daemons.pop(f"slurmd {host.name}")
        kill(host.processes())

    def run(self, *command: str, check: bool = True, host: Host | None = None) -> str:
        """A SLURM command on the first host."""
        return (host or self.first).run(*command, env=self.environment, check=check)

    def node_states(self) -> list[str]:
        """State of each node."""
        return self.run("sinfo", "--noheader", "--Node", "--partition=low", "--format=%T", check=False).split()

    def submit(self, *arguments: str) -> int:
        """``sbatch``; the job's number."""
        return int(self.run("sbatch", "--parsable", *arguments).split(";")[0])

    def show(self, job: int) -> dict[str, str]:
        """What ``scontrol show job`` says."""
        text = self.run("scontrol", "show", "job", "--oneliner", str(job))
        return dict(part.split("=", 1) for part in re.split(r"\s+(?=[A-Za-z:/_]+=)", text.strip()))

    def wait(self, job: int, *states: str, seconds: float = TIMEOUT) -> dict[str, str]:
        """Wait until the job is in one of ``states``.

        A requeued job starts when its credential has expired (``cred_expire``). It is not released
        sooner: a node that ended it within the same second takes the new start for the old one and
        refuses it.
        """
        shown: dict[str, str] = {}

        def there() -> bool:
            shown.clear()
            shown.update(self.show(job))
            return shown["JobState"] in states

        until(there, lambda: f"{shown}\n{self.log(job)}\n{self.logs()}", seconds)
        return dict(shown)

    def log(self, job: int) -> str:
        """What the job wrote."""
        path = Path(self.show(job)["StdOut"])
        return path.read_text() if path.is_file() else f"no file {path}"

    def logs(self) -> str:
        """The ends of the daemons' logs."""
        parts = []
        for path in sorted(self.folder.glob("*.log")) + sorted(self.folder.glob("*.out")):
            parts.append(f"--- {path.name}\n" + "\n".join(path.read_text(errors="replace").splitlines()[-25:]))
        return "\n".join(parts)
