#!/bin/bash
# A Slurm job that scores a dataset on all GPUs of several nodes, with Ray.
#
#     sbatch --nodes=4 --gres=gpu:8 examples/clusters/slurm-score.sh ./sft-model pairs.jsonl.gz --store s3://team/logps
#
# The arguments are those of `reflogp score`. The model, and the store if it is a folder, must be on a filesystem that all nodes share.
#SBATCH --job-name=reflogp-score
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --time=24:00:00
set -euo pipefail

[ $# -ge 2 ] || { echo "usage: slurm-score.sh MODEL DATASET [OPTIONS of reflogp score]" >&2; exit 2; }
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${nodes[0]}
port=$((20000 + SLURM_JOB_ID % 10000))  # a different port for each job on this node
trap 'kill $(jobs -p) 2> /dev/null || true; wait || true' EXIT

srun --nodes=1 --ntasks=1 --nodelist="$head" ray start --head --port="$port" --block > /dev/null &
until srun --nodes=1 --ntasks=1 --nodelist="$head" --overlap ray status --address="$head:$port" > /dev/null 2>&1; do
    jobs -r | grep -q . || { echo "Ray did not start on $head" >&2; exit 1; }
    sleep 2
done
for node in "${nodes[@]:1}"; do
    srun --nodes=1 --ntasks=1 --nodelist="$node" ray start --address="$head:$port" --block > /dev/null &
done
deadline=$((SECONDS + 600))  # wait for all nodes: `reflogp score` counts the GPUs once
until [ "$(srun --nodes=1 --ntasks=1 --nodelist="$head" --overlap ray status --address="$head:$port" 2> /dev/null \
    | sed -n '/^Active:/,/^Pending:/p' | grep -c node_)" -ge "${#nodes[@]}" ]; do
    [ $SECONDS -lt $deadline ] || { echo "not all of ${nodes[*]} joined Ray within ten minutes" >&2; exit 1; }
    sleep 2
done
srun --nodes=1 --ntasks=1 --nodelist="$head" --overlap reflogp score --ray "$head:$port" "$@"
