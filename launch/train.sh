#!/usr/bin/env bash
# Trains a model on all GPUs of this machine, or on 2 CPU ranks if it has none. Makes the
# environment by itself.
#
#   launch/train.sh                                   trains configs/omn_tiny.yaml
#   launch/train.sh configs/x.yaml key=value ...      any configuration, with overrides
#
# On several machines: the same command on each machine, with NODE_RANK 0, 1, ... and the address of
# machine 0:
#
#   NODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 launch/train.sh configs/x.yaml
#
# RANKS=N         number of ranks on each machine (default: its GPUs, or 2)
# MASTER_PORT=N   port at which the machines meet (default: 29400)
# RENDEZVOUS=R    how torchrun's agents find each other: static (default) or c10d
# LOG_FOLDER=F    write the output of each rank to a file in F; rank 0 is on the screen as well
#
# Exit status: 0 finished; 1 the run failed; 2 wrong input, explained in one line; 75 the run was
# asked to stop and saved a checkpoint, and the same command continues it.
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
    # A path relative to the repository works from any folder.
    [[ -e "$config" || ! -e "$REPOSITORY/$config" ]] || config="$REPOSITORY/$config"
fi

prepare_environment

num_gpus=0
if command -v nvidia-smi >/dev/null; then
    # torch counts the GPUs in CUDA_VISIBLE_DEVICES that its build can use.
    num_gpus="$("$ENVIRONMENT_PYTHON" -c 'import torch; print(torch.cuda.device_count())')"
    if [[ "$num_gpus" -eq 0 && -z "${CUDA_VISIBLE_DEVICES+set}" ]] && nvidia-smi -L >/dev/null 2>&1; then
        echo "warning: nvidia-smi lists GPUs, but the installed torch can use none; training on CPU ranks" >&2
    fi
fi
ranks="${RANKS:-$((num_gpus > 0 ? num_gpus : 2))}"
[[ "$ranks" =~ ^[1-9][0-9]*$ ]] || fail "RANKS: found '$ranks', expected a positive number"

# The launcher checks the input, starts torchrun's agent, sends signals on to the ranks, and exits
# with their status.
exec "$ENVIRONMENT_PYTHON" -m omn_dist launch "$config" "$@" --ranks-per-node "$ranks" \
    --rendezvous "${RENDEZVOUS:-static}" ${LOG_FOLDER:+--log-folder "$LOG_FOLDER"}
