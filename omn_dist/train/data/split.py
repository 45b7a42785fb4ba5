"""The choice of files for training and for validation."""

import hashlib
from collections.abc import Mapping

from omn_dist.settings import SettingsError


def split_by_file(size_by_name: Mapping[str, int], fraction: float, seed: int) -> tuple[list[str], list[str]]:
    """Names of the files for training and of those for validation, both sorted and not empty.

    Files are taken for validation in the order of a hash of (seed, name) until they have
    ``fraction`` of all bytes. So one more file changes the choice for few of the others.

    Raises:
        SettingsError: fewer than two files, or a fraction outside (0, 1).
    """
    if not 0.0 < fraction < 1.0:
        raise SettingsError(f"validation_fraction: found {fraction}, expected a number between 0 and 1")
    if len(size_by_name) < 2:
        raise SettingsError(f"text files: found {len(size_by_name)}, expected at least 2 to split by file")
    wanted = fraction * sum(size_by_name.values())
    ranked = sorted(size_by_name, key=lambda name: (hashlib.sha256(f"{seed}:{name}".encode()).digest(), name))
    validation: list[str] = []
    held = 0
    for name in ranked[:-1]:
        if validation and held >= wanted:
            break
        validation.append(name)
        held += size_by_name[name]
    return sorted(set(ranked) - set(validation)), sorted(validation)
