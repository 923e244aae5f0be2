#!/usr/bin/env bash
#SBATCH --job-name=slime
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --signal=B:USR1@300
#
# A run on several nodes: a Ray cluster for this job alone, and `slime run` on its first node.
#   sbatch examples/cluster/slurm.sh run.toml [--flag value ...]
# Run file, model, data and run folder lie on a file system that all nodes share. A job that is requeued goes on where it
# was: the same command finds its run folder again. With an image: SLIME_IMAGE=slime.sif (Apptainer) before sbatch.
# Slurm itself requeues (--requeue) after a failed node or preemption. At the time limit this script does it.
set -euo pipefail

[ $# -gt 0 ] || { echo "usage: sbatch slurm.sh run.toml [--flag value ...]" >&2; exit 2; }

in_image=()
if [ -n "${SLIME_IMAGE:-}" ]; then
    in_image=(apptainer exec --nv --bind "$PWD" "$SLIME_IMAGE")
fi

# Ray sends pickles over its ports. Whoever has no token is refused; the file is for this user alone.
token="$PWD/.ray-token-$SLURM_JOB_ID"
(umask 077 && head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n' > "$token")
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="$token" RAY_USAGE_STATS_ENABLED=0

head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
address=$(srun --nodes=1 --ntasks=1 -w "$head" hostname -I | awk '{print $1}')
port=$((20000 + SLURM_JOB_ID % 10000))
gpus=${SLURM_GPUS_ON_NODE:-8}

stop() {
    # Once: at a second signal slime ends without saving.
    trap '' USR1 USR2 TERM INT
    # The signal may come before the line after `slime run`.
    run=${run:-${begun:+$!}}
    [ -n "$run" ] || return 0
    kill -TERM "$run" 2>/dev/null || true
    # It saves at the next clean point. The rest of the 300 s is for Slurm.
    for _ in $(seq 270); do
        kill -0 "$run" 2>/dev/null || break
        sleep 1
    done
}
at_time_limit() {
    stop
    if [ -n "${run:-}" ] && ! kill -0 "$run" 2>/dev/null && wait "$run"; then
        exit 0 # It was at its end.
    fi
    rm -f "$token"
    scontrol requeue "$SLURM_JOB_ID"
    exit 0
}
trap at_time_limit USR1
trap 'stop; exit 143' USR2
# scancel alone: Slurm tells every process, slime too, and kills them soon after.
trap 'wait ${run:-}; exit 143' TERM INT
trap 'kill $(jobs -p) 2>/dev/null || true; rm -f "$token"' EXIT

srun --nodes=1 --ntasks=1 --overlap -w "$head" "${in_image[@]}" \
    ray start --head --block --node-ip-address "$address" --port "$port" --num-gpus "$gpus" \
    --include-dashboard false --disable-usage-stats &
if [ "$SLURM_JOB_NUM_NODES" -gt 1 ]; then
    sleep 10
    srun --nodes=$((SLURM_JOB_NUM_NODES - 1)) --ntasks=$((SLURM_JOB_NUM_NODES - 1)) --overlap --exclude "$head" \
        "${in_image[@]}" ray start --block --address "$address:$port" --num-gpus "$gpus" --disable-usage-stats &
fi

# Until all nodes are there.
for _ in $(seq 60); do
    alive=$(srun --nodes=1 --ntasks=1 --overlap -w "$head" "${in_image[@]}" \
        ray status --address "$address:$port" 2>/dev/null | grep -c "^ 1 node_" || true)
    [ "$alive" -ge "$SLURM_JOB_NUM_NODES" ] && break
    sleep 5
done

# This script runs on the first node. Not through srun, which hands a signal to every process of a step, so that one in an image
# gets it twice.
begun=1
"${in_image[@]}" slime run "$@" --launcher ray --address "$address:$port" --num-gpus-per-node "$gpus" &
run=$!
wait "$run"
