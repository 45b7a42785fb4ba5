"""Reads a job from YAML, and submits it with ``sbatch``."""

import dataclasses
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Literal

from omn_dist.launch.job_layout import Launcher
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
    """A SLURM job: the run, its machines, and its time."""

    config: str
    """YAML file of the run, relative to the folder of submission."""
    overrides: tuple[str, ...] = ()
    """``key=value`` for the run."""
    name: str = "omn_dist"
    """Name in SLURM's queue."""
    nodes: int = 1
    """Number of machines."""
    gpus_per_node: int = 0
    """Number of GPUs on each machine; 0: ranks on CPUs."""
    ranks_per_node: int | None = None
    """Number of ranks on each machine; null: one for each GPU."""
    cpus_per_rank: int | None = None
    """Number of cores for each rank; null: the default of the partition."""
    memory: str | None = None
    """Memory on each machine, such as ``200G``; null: the default of the partition."""
    time: str
    """Time limit of one attempt, in a form of SLURM: ``minutes``, ``hours:minutes:seconds``,
    ``days-hours:minutes:seconds``. More than ``signal_seconds`` and a minute."""
    partition: str | None = None
    """Partition of the cluster; null: the default one."""
    account: str | None = None
    """Account that is charged; null: the user's default."""
    quality: str | None = None
    """Quality of service (``--qos``); null: the default one."""
    launcher: Launcher = "torchrun"
    """``torchrun``: one task for each machine; ``srun``: one task for each rank."""
    environment: str | None = None
    """Folder of the virtual environment on the machines; null: the active one, or ``.venv``."""
    container: tuple[str, ...] = ()
    """Command that runs another command in a container, as a list of words such as
    ``[apptainer, exec, --nv, image.sif]``."""
    signal: StopSignal = "SIGUSR1"
    """Signal that SLURM sends before the time limit; one of the run's ``stop_signals``."""
    signal_seconds: int = 300
    """Seconds from the signal to the time limit; more than a step and a checkpoint take together.
    SLURM may send the signal a minute earlier."""
    requeue: bool = True
    """Put the job back into the queue when it is preempted, reaches its time limit, or loses a
    machine."""
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
    """Seconds of a time limit in SLURM's forms: ``m``, ``m:s``, ``h:m:s``, ``d-h[:m[:s]]``.

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
        SettingsError: an unknown or wrong key in either, or settings that do not fit each other.
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
    """The words of the ``sbatch`` command.

    Args:
        job: the job.
        repository: folder of the repository, which has ``slurm/``.
        run_folder: absolute path; the log of the job and a copy of its configuration are there.
    """
    tasks = 1 if job.launcher == "torchrun" else job.ranks
    # The one task of torchrun gets the cores of all its ranks.
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
        # Without "B:" SLURM sends the signal to the ranks instead of the script.
        ("signal", f"{job.signal.removeprefix('SIG')}@{job.signal_seconds}"),
        ("output", run_folder / "slurm-%j.log"),
        # So that a requeued job continues its log.
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
    """Print the command of a job and, unless ``dry_run``, run it. Returns the exit status.

    The YAML of the job, that of the run, and the command are saved in the run folder. The job reads
    the saved YAML, so that a later change of the file has no effect on a job in the queue.

    Raises:
        SettingsError: wrong settings, or there is no ``sbatch`` on this machine.
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
    _save_copy(run_folder / JOB_COPY, Path(path).read_text("utf-8"))
    _save_copy(run_folder / CONFIG_COPY, Path(job.config).read_text("utf-8"))
    _save_copy(run_folder / COMMAND_COPY, shlex.join(command) + "\n")
    sys.stdout.flush()
    return subprocess.run(command, check=False).returncode


def _save_copy(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    except OSError as error:
        raise SettingsError(f"{path}: cannot be written: {error.strerror}; choose another run_folder") from None
