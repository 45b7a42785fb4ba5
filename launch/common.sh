# Set-up shared by the launchers. Source it, then call prepare_environment.
# shellcheck shell=bash

REPOSITORY="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)"
readonly REPOSITORY

fail() {
    echo "error: $*" >&2
    exit 2
}

# Prints the newest suitable Python on the path, or the one that PYTHON names.
find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3.13 python3.12 python3.11 python3 python; do
        if "$candidate" -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    fail "found no Python of at least 3.11 with the venv module; install one, or set PYTHON to it"
}

# Identifies what an environment was set up for: this folder, these requirements and versions.
requirements_stamp() {
    echo "$REPOSITORY $(cat "$REPOSITORY/pyproject.toml" "$REPOSITORY/constraints.txt" | cksum)"
}

# Uses the active virtual environment, or makes .venv in the repository, and installs what is
# missing. Sets ENVIRONMENT_PYTHON.
prepare_environment() {
    local environment="${VIRTUAL_ENV:-$REPOSITORY/.venv}" base_python
    ENVIRONMENT_PYTHON="$environment/bin/python"
    if [[ ! -x "$ENVIRONMENT_PYTHON" ]]; then
        [[ -z "${VIRTUAL_ENV:-}" ]] || fail "VIRTUAL_ENV is $environment, which has no bin/python; deactivate it"
        base_python="$(find_python)"
        echo "making the virtual environment $environment with $base_python" >&2
        "$base_python" -m venv "$environment"
    fi
    local stamp="$environment/omn_dist.stamp"
    [[ -f "$stamp" && "$(<"$stamp")" == "$(requirements_stamp)" ]] && return
    "$ENVIRONMENT_PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        fail "$environment has $("$ENVIRONMENT_PYTHON" --version), expected Python 3.11 or later; deactivate it"
    "$ENVIRONMENT_PYTHON" -m pip --version >/dev/null 2>&1 || "$ENVIRONMENT_PYTHON" -m ensurepip >/dev/null
    echo "installing what is missing in $environment (the first time takes minutes)" >&2
    "$ENVIRONMENT_PYTHON" -m pip install --quiet --disable-pip-version-check \
        --constraint "$REPOSITORY/constraints.txt" --editable "${REPOSITORY}[dev]" >&2
    requirements_stamp >"$stamp"
}
