"""Which files a run trains on and which it is validated on."""

import hashlib
from collections.abc import Mapping

from omn_dist.settings import SettingsError


def split_by_file(size_by_name: Mapping[str, int], fraction: float, seed: int) -> tuple[list[str], list[str]]:
    """Names for training and for validation, each sorted; every file is on exactly one side, and neither side is empty.

    Files are ranked by a hash of (seed, name), so that one more file moves few of the others, and taken for validation
    until they hold ``fraction`` of all bytes.

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
