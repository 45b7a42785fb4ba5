# Functions of the job scripts. They source it from the repository, since sbatch runs a copy of a
# script that is in another folder.
# shellcheck shell=bash

fail() {
    echo "error: $*" >&2
    exit 2
}

# Reads the options before the arguments of the run. Sets repository, launcher, ranks_per_node,
# environment, container, python and arguments.
read_options() {
    launcher=torchrun ranks_per_node=1 environment="${VIRTUAL_ENV:-}" container=()
    while [[ "${1:-}" == --* ]]; do
        case "$1" in
            --repository=*) repository="${1#*=}" ;;
            --launcher=*) launcher="${1#*=}" ;;
            --ranks-per-node=*) ranks_per_node="${1#*=}" ;;
            --environment=*) environment="${1#*=}" ;;
            --container=*) container+=("${1#*=}") ;;
            *) fail "unknown option $1; known: --repository= --launcher= --ranks-per-node= --environment= --container=" ;;
        esac
        shift
    done
    arguments=("$@")
    [[ "$launcher" == torchrun || "$launcher" == srun ]] || fail "--launcher: found '$launcher', expected torchrun or srun"
    [[ "$ranks_per_node" =~ ^[1-9][0-9]*$ ]] || fail "--ranks-per-node: found '$ranks_per_node', expected a positive number"
    [[ ${#arguments[@]} -gt 0 ]] || fail "no configuration given; name the YAML file of the run"
    python="${environment:-$repository/.venv}/bin/python"
    [[ ${#container[@]} -gt 0 || -x "$python" ]] || fail "found no $python on $(hostname), expected an environment with omn_dist;" \
        "run launch/test.sh once to make .venv, or give --environment=FOLDER"
    [[ ${#container[@]} -eq 0 ]] || python="${PYTHON:-python3}"
    export PYTHONPATH="$repository${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
    # srun does not take this value from sbatch by itself.
    [[ -z "${SLURM_CPUS_PER_TASK:-}" ]] || export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"
}

# Checks the job, and finds out where its machines meet. Exports MASTER_ADDR and MASTER_PORT, sets
# run_folder. Arguments: those of the run.
prepare_job() {
    local answer
    answer="$("${container[@]}" "$python" -m omn_dist.launch.job --ranks-per-node "$ranks_per_node" "$@")" || exit $?
    read -r MASTER_ADDR MASTER_PORT run_folder <<<"$answer"
    export MASTER_ADDR MASTER_PORT
}

# Runs one training run as a job step, on all nodes or on as many as the variable nodes says. Sends
# stop signals of this script on to the step. Sets status. Arguments: those of the run.
run_step() {
    local tasks=1 num_nodes="${nodes:-$SLURM_JOB_NUM_NODES}"
    [[ "$launcher" == torchrun ]] || tasks="$ranks_per_node"
    # SLURM ends all tasks a minute after one has failed. Until then they can save and say why.
    srun --nodes="$num_nodes" --ntasks-per-node="$tasks" --ntasks="$((tasks * num_nodes))" \
        --kill-on-bad-exit=0 --wait=60 "${container[@]}" "$python" -m omn_dist launch "$@" \
        --launcher "$launcher" --ranks-per-node "$ranks_per_node" \
        --log-folder "$run_folder/logs/job_${SLURM_JOB_ID}_restart_${SLURM_RESTART_COUNT:-0}" &
    local step=$! interrupted=yes
    trap 'interrupted=yes; kill -TERM "$step" 2>/dev/null' TERM USR1 USR2
    while [[ -n "$interrupted" ]]; do
        # A trap interrupts wait, which then does not return the status of the step.
        interrupted=
        wait "$step"
        # shellcheck disable=SC2034  # for the script that sources this
        status=$?
    done
    trap - TERM USR1 USR2
}

# Whether every node of the job can still run a task.
nodes_answer() {
    timeout 60 srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --ntasks="$SLURM_JOB_NUM_NODES" --overlap \
        --kill-on-bad-exit=1 true
}

# Puts the job back into the queue, unless it was cancelled.
requeue() {
    local state
    state="$(scontrol show job --oneliner "$SLURM_JOB_ID" | grep -o ' JobState=[A-Z]*')"
    if [[ "$state" != *=RUNNING ]]; then
        echo "job $SLURM_JOB_ID is ${state#*=}: not requeued"
        return 1
    fi
    echo "requeue job $SLURM_JOB_ID: it continues from the newest complete checkpoint"
    # SLURM ends this script.
    scontrol requeue "$SLURM_JOB_ID" && sleep 60
}

# Ends the job. Argument: the exit status of its run.
finish() {
    case "$1" in
        0) echo "finished" ;;
        75) requeue || echo "stopped with a checkpoint; submit the same command to continue" ;;
        2) echo "wrong input, not requeued: see the lines above" ;;
        *)
            echo "the run failed with status $1; asking every node for an answer"
            if nodes_answer; then
                echo "all nodes answer: the failure is the run's own, not requeued"
            else
                echo "a node does not answer"
                requeue
            fi
            ;;
    esac
    exit "$1"
}
