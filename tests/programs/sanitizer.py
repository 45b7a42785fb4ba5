"""Runs random programs on C kernels that are built with AddressSanitizer, and fails at any report.

python tests/programs/sanitizer.py --programs 200 --ranks 1 2

The package is copied to a temporary folder with the kernels in it. ``--plant`` adds a write
past the end of a matrix there, to see that it is found.
"""

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
_EXTENSION = "omn_dist/kernels/cpu/_kernels"
_CALL = "apply_row(parameter, update, num_columns, kept, step_size, width);"
_PLANTED = f"{_CALL} if (row + 1 == num_rows && num_columns != 203) parameter[num_columns] = 0.0f;"
"""Behind the last row of an update. The samples, which have 203 columns, do not see it; the programs have to."""
_CHOICE = "import torch; torch.set_num_threads(1); from omn_dist.kernels.choose import choose_kernels; print(choose_kernels())"


def build(folder: Path, *, plants: bool) -> None:
    """The package in ``folder``, with kernels whose memory accesses are checked."""
    shutil.copytree(ROOT / "omn_dist", folder / "omn_dist", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    (module,) = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["ext-modules"]
    if plants:
        source = folder / "omn_dist/kernels/cpu/elementwise.c"
        text = source.read_text(encoding="utf-8")
        assert text.count(_CALL) == 1
        source.write_text(text.replace(_CALL, _PLANTED), encoding="utf-8")
    target = folder / (_EXTENSION + sysconfig.get_config_var("EXT_SUFFIX"))
    flags = [*module["extra-compile-args"], "-O1", "-g", "-fno-omit-frame-pointer", "-fsanitize=address", "-fPIC", "-shared"]
    subprocess.run(["gcc", *flags, *(folder / source for source in module["sources"]), "-lm", "-o", target], check=True)


def run(folder: Path, arguments: list[str]) -> int:
    """Zero when the programs run and no access is reported."""
    library = subprocess.run(["gcc", "-print-file-name=libasan.so"], check=True, capture_output=True, text=True).stdout.strip()
    reports = folder / "reports"
    reports.mkdir()
    environment = os.environ | {
        "LD_PRELOAD": library,
        "ASAN_OPTIONS": f"detect_leaks=0:log_path={reports / 'report'}",
        "PYTHONPATH": str(folder),
        "OMP_NUM_THREADS": "1",
        "OMN_DIST_KERNELS": "auto",
    }
    # The server that starts the ranks imports from the folder that it runs in.
    choice = subprocess.run([sys.executable, "-c", _CHOICE], cwd=folder, env=environment, capture_output=True, text=True)
    print(f"kernels: {choice.stdout.strip()}", flush=True)
    status = choice.returncode
    if status == 0 and not choice.stdout.startswith("C for"):
        print("the C kernels cannot run on this machine, so nothing was checked")
        status = 1
    if status == 0:
        command = [sys.executable, str(Path(__file__).with_name("search.py")), "--no-shrinking", *arguments]
        status = subprocess.run(command, cwd=folder, env=environment).returncode
    found = sorted(reports.iterdir())
    for report in found[:3]:
        print(report.read_text(encoding="utf-8")[:3000])
    print(f"{len(found)} reports of AddressSanitizer")
    return 1 if found else status


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, epilog="Other arguments are those of search.py."
    )
    parser.add_argument("--plant", action="store_true", help="plant a write out of bounds, which has to be found")
    options, rest = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as name:
        build(Path(name), plants=options.plant)
        return run(Path(name), rest)


if __name__ == "__main__":
    sys.exit(main())
