"""The choice of kernels: once per process, logged in one line."""

import logging
import os
from functools import cache
from typing import Literal, get_args

import torch

from omn_dist.kernels.base import TORCH, Kernels
from omn_dist.kernels.cpu.kernels import CpuKernels, build_cpu_kernels
from omn_dist.kernels.cpu.library import FLAGS_VARIABLE, NoKernelsError
from omn_dist.settings import SettingsError, unknown_name

logger = logging.getLogger("omn_dist.kernels")

KernelChoice = Literal["auto", "torch"]
VARIABLE = "OMN_DIST_KERNELS"
"""Environment variable that overrides the choice of the program."""


def choose_kernels(choice: KernelChoice = "auto") -> Kernels:
    """The kernels of this process; results do not depend on them.

    ``auto`` takes the C kernels where the package has them, the process has one thread, and samples
    of their results equal torch's; ``torch`` takes none. The environment variable
    ``OMN_DIST_KERNELS``, set to one of the two, overrides ``choice``. What is chosen and why is
    logged once, at level INFO.

    Raises:
        SettingsError: another name.

    Not collective.
    """
    named = os.environ.get(VARIABLE) or choice
    source = f"{VARIABLE}={named}" if os.environ.get(VARIABLE) else f"kernels={named!r}"
    if named not in get_args(KernelChoice):
        raise SettingsError(unknown_name(f"choice of kernels ({source})", named, get_args(KernelChoice)))
    if named == "torch":
        return _torch(source)
    if torch.get_num_threads() != 1:
        return _torch(f"found {torch.get_num_threads()} threads, the C kernels have one")
    return _cpu(os.environ.get(FLAGS_VARIABLE))


@cache
def _torch(reason: str) -> Kernels:
    logger.info("kernels: torch (%s)", reason)
    return TORCH


@cache
def _cpu(flags: str | None) -> Kernels:
    try:
        found: CpuKernels = build_cpu_kernels(flags)
    except NoKernelsError as error:
        return _torch(str(error))
    logger.info("kernels: %s", found)
    return found
