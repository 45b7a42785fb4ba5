#!/usr/bin/env bash
# Trains a model on all GPUs of this machine, or on 2 CPU ranks where there is none. Does all set-up by itself.
#
#   launch/train.sh                                   configs/omn_tiny.yaml
#   launch/train.sh configs/x.yaml key=value ...      any configuration, with overrides
#
# RANKS=N chooses another number of ranks. Exit status 2: something in the input cannot be used; one line says what.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"

if [[ "${1:-}" == -h || "${1:-}" == --help ]]; then
    sed -n '2,/^set /{/^set /d; s/^# \{0,1\}//; p}' "${BASH_SOURCE[0]}"
    exit
fi
config="$REPOSITORY/configs/omn_tiny.yaml"
if [[ $# -gt 0 && "$1" != *=* ]]; then
    config="$1"
    shift
    # Names below the repository work from any folder.
    [[ -e "$config" || ! -e "$REPOSITORY/$config" ]] || config="$REPOSITORY/$config"
fi

prepare_environment

num_gpus=0
if command -v nvidia-smi >/dev/null; then
    # torch counts the GPUs that CUDA_VISIBLE_DEVICES leaves and that its own build can use.
    num_gpus="$("$ENVIRONMENT_PYTHON" -c 'import torch; print(torch.cuda.device_count())')"
    if [[ "$num_gpus" -eq 0 && -z "${CUDA_VISIBLE_DEVICES+set}" ]] && nvidia-smi -L >/dev/null 2>&1; then
        echo "warning: nvidia-smi lists GPUs, but the installed torch can use none; training on CPU ranks" >&2
    fi
fi
ranks="${RANKS:-$((num_gpus > 0 ? num_gpus : 2))}"
[[ "$ranks" =~ ^[1-9][0-9]*$ ]] || fail "RANKS: found '$ranks', expected a positive number"

num_cores="$(getconf _NPROCESSORS_ONLN)"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((num_cores > ranks ? num_cores / ranks : 1))}"

# torchrun answers any failure with status 1 and a page of text, so the input is checked before it, in one process.
"$ENVIRONMENT_PYTHON" -m omn_dist train "$config" "$@" --check --ranks "$ranks"
exec "$ENVIRONMENT_PYTHON" -m torch.distributed.run --standalone --nproc-per-node "$ranks" \
    --signals-to-handle SIGTERM,SIGINT,SIGUSR1 -m omn_dist train "$config" "$@"
