"""From a job's YAML to the ``sbatch`` command that runs it."""

import dataclasses
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Literal

from omn_dist.launch.layout import Launcher
from omn_dist.settings import SettingsError, from_mapping
from omn_dist.train.config import RunConfig, load_config, read_yaml

StopSignal = Literal["SIGTERM", "SIGUSR1", "SIGUSR2"]

_TIME = re.compile(r"(?:(\d+)-)?(\d+(?::\d+){0,2})")
_EARLY_SECONDS = 60
_SCRIPT = Path("slurm") / "train.sbatch"
CONFIG_COPY, JOB_COPY, COMMAND_COPY = "config.yaml", "job.yaml", "submit.txt"
"""Files that a submitted job has in its run folder."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobConfig:
    """A job: what runs, on how much, for how long."""

    config: str
    """YAML file of the run, relative to the folder of submission."""
    overrides: tuple[str, ...] = ()
    """``key=value`` for the run."""
    name: str = "omn_dist"
    """Name in SLURM's queue."""
    nodes: int = 1
    """Machines."""
    gpus_per_node: int = 0
    """GPUs, and ranks, on each machine; 0: CPU ranks."""
    ranks_per_node: int | None = None
    """Ranks on each machine; null: one a GPU."""
    cpus_per_rank: int | None = None
    """Cores for each rank; null: the partition's default."""
    memory: str | None = None
    """Memory of each machine, such as ``200G``; null: the partition's default."""
    time: str
    """Longest run of one attempt, in SLURM's form: ``minutes``, ``hours:minutes:seconds``, ``days-hours:minutes:seconds``;
    more than ``signal_seconds`` and a minute."""
    partition: str | None = None
    """Partition; null: the default one."""
    account: str | None = None
    """Account to charge; null: the user's own."""
    quality: str | None = None
    """Quality of service (``--qos``); null: the default one."""
    launcher: Launcher = "torchrun"
    """``torchrun``: one task a machine; ``srun``: one task a rank."""
    environment: str | None = None
    """Folder of the virtual environment on the nodes; null: the active one, or ``.venv``."""
    container: tuple[str, ...] = ()
    """Command that runs another one in a container, such as ``[apptainer, exec, --nv, image.sif]``."""
    signal: StopSignal = "SIGUSR1"
    """Signal before the time limit; must be among the run's ``stop_signals``."""
    signal_seconds: int = 300
    """How long before the time limit; longer than a step and a checkpoint together. SLURM may be a minute early."""
    requeue: bool = True
    """Put the job back into the queue when it was preempted, ran into its time limit, or lost a node."""
    extra: tuple[str, ...] = ()
    """Further options of ``sbatch``."""

    def __post_init__(self) -> None:
        for name, least in (("nodes", 1), ("gpus_per_node", 0), ("signal_seconds", 1)):
            if getattr(self, name) < least:
                raise SettingsError(f"{name}: found {getattr(self, name)}, expected at least {least}")
        if self.cpus_per_rank is not None and self.cpus_per_rank < 1:
            raise SettingsError(f"cpus_per_rank: found {self.cpus_per_rank}, expected at least 1, or null")
        seconds = time_limit_seconds(self.time)
        if seconds <= self.signal_seconds + _EARLY_SECONDS:
            raise SettingsError(
                f"time: found {self.time!r}, {seconds} s, expected more than signal_seconds + {_EARLY_SECONDS} = "
                f"{self.signal_seconds + _EARLY_SECONDS}: the job would be told to stop when it starts; change one of them"
            )
        if self.ranks_per_node is None and self.gpus_per_node == 0:
            raise SettingsError("ranks_per_node: not set, expected a number where gpus_per_node is 0")
        if self.ranks < 1 or (self.gpus_per_node and self.ranks > self.gpus_per_node):
            raise SettingsError(
                f"ranks_per_node: found {self.ranks}, expected 1 to gpus_per_node = {self.gpus_per_node}, one GPU a rank"
            )

    @property
    def ranks(self) -> int:
        """Ranks on each machine."""
        return self.gpus_per_node if self.ranks_per_node is None else self.ranks_per_node


def time_limit_seconds(text: str) -> int:
    """SLURM's forms of a time limit in seconds: ``m``, ``m:s``, ``h:m:s``, ``d-h``, ``d-h:m``, ``d-h:m:s``.

    Raises:
        SettingsError: another form.
    """
    match = _TIME.fullmatch(text)
    if match is None:
        raise SettingsError(f"time: found {text!r}, expected such as '90', '12:00:00' or '2-00:00:00', in quotes")
    parts = [int(part) for part in match[2].split(":")]
    with_hours = match[1] is not None or len(parts) == 3
    units = (3600, 60, 1) if with_hours else (60, 1)
    return int(match[1] or 0) * 86_400 + sum(part * unit for part, unit in zip(parts, units, strict=False))


def load_job(path: str | Path) -> tuple[JobConfig, RunConfig]:
    """Read a job's YAML and the configuration of its run.

    Raises:
        SettingsError: an unknown or wrong key in one of them, or settings that do not fit each other.
    """
    job = from_mapping(JobConfig, read_yaml(Path(path)))
    config = load_config(job.config, job.overrides)
    if job.signal not in config.stop_signals:
        raise SettingsError(
            f"signal: found {job.signal}, expected one of the run's stop_signals ({', '.join(config.stop_signals)}): another "
            "one would end the ranks without a checkpoint; change one of them"
        )
    return job, config


def sbatch_command(job: JobConfig, repository: Path, run_folder: Path) -> list[str]:
    """The exact command. Pure.

    Args:
        job: what to run.
        repository: where ``slurm/`` is.
        run_folder: absolute; the job's log is there, and a copy of its configuration.
    """
    tasks = 1 if job.launcher == "torchrun" else job.ranks
    # torchrun's one task has the cores of all its ranks.
    cpus = None if job.cpus_per_rank is None else job.cpus_per_rank * job.ranks // tasks
    options: list[tuple[str, object | None]] = [
        ("job-name", job.name),
        ("nodes", job.nodes),
        ("ntasks-per-node", tasks),
        ("gpus-per-node", job.gpus_per_node or None),
        ("cpus-per-task", cpus),
        ("mem", job.memory),
        ("time", job.time),
        ("partition", job.partition),
        ("account", job.account),
        ("qos", job.quality),
        # Without "B:" the signal goes to the ranks, not to the script.
        ("signal", f"{job.signal.removeprefix('SIG')}@{job.signal_seconds}"),
        ("output", run_folder / "slurm-%j.log"),
        # A requeued job continues its log.
        ("open-mode", "append"),
        ("chdir", Path.cwd()),
    ]
    command = ["sbatch", *(f"--{name}={value}" for name, value in options if value is not None)]
    command += ["--requeue" if job.requeue else "--no-requeue", *job.extra, str(repository / _SCRIPT)]
    command += [f"--repository={repository}", f"--launcher={job.launcher}", f"--ranks-per-node={job.ranks}"]
    if job.environment is not None:
        command.append(f"--environment={Path(job.environment).expanduser()}")
    command += [f"--container={word}" for word in job.container]
    return [*command, str(run_folder / CONFIG_COPY), *job.overrides, f"run_folder={run_folder}"]


def submit(path: str | Path, *, dry_run: bool) -> int:
    """Print the command of a job and, unless ``dry_run``, run it; the exit status.

    The run folder gets what explains the job later: its YAML, the run's, and the command. The job reads the copy, so a
    later change of the file does not reach a job that waits in the queue.

    Raises:
        SettingsError: wrong settings, or no ``sbatch`` here.
    """
    job, config = load_job(path)
    run_folder = Path(config.run_folder).resolve()
    repository = Path(__file__).resolve().parents[2]
    if not (repository / _SCRIPT).is_file():
        raise SettingsError(f"{repository / _SCRIPT}: not found, expected the job script; run from a checkout of the repository")
    command = sbatch_command(job, repository, run_folder)
    print(shlex.join(command))
    if dry_run:
        return 0
    if shutil.which("sbatch") is None:
        raise SettingsError("sbatch: not found on PATH, expected SLURM's command; submit on a login node, or use --dry-run")
    _keep(run_folder / JOB_COPY, Path(path).read_text("utf-8"))
    _keep(run_folder / CONFIG_COPY, Path(job.config).read_text("utf-8"))
    _keep(run_folder / COMMAND_COPY, shlex.join(command) + "\n")
    sys.stdout.flush()
    return subprocess.run(command, check=False).returncode


def _keep(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    except OSError as error:
        raise SettingsError(f"{path}: cannot be written: {error.strerror}; choose another run_folder") from None
