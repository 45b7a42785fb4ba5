#!/usr/bin/env bash
# Runs the tests, and reports how many passed, failed and were skipped, and why. Makes the
# environment by itself.
#
#   launch/test.sh [pytest arguments]       paths are relative to the repository
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"

prepare_environment
cd -- "$REPOSITORY"
exec "$ENVIRONMENT_PYTHON" -m pytest -ra "$@"
