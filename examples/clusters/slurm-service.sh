#!/bin/bash
# A Slurm job that runs a service and a training run on one node: the service uses the first GPU, and the run uses the other GPUs.
#
#     sbatch --gres=gpu:8 examples/clusters/slurm-service.sh ./sft-model python train.py
#
# The run gets the service's address in $REFLOGP_URL and its token in $REFLOGP_TOKEN. The service stops when the run ends. To
# configure this script, set the environment variables REFLOGP_STORE (default: ./logps; use a filesystem that persists after the
# job), REFLOGP_DTYPE, and REFLOGP_START_SECONDS (maximum seconds until the service is ready; default: 3600).
#SBATCH --job-name=reflogp
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=16
#SBATCH --time=24:00:00
set -euo pipefail

[ $# -ge 2 ] || { echo "usage: slurm-service.sh MODEL COMMAND…" >&2; exit 2; }
model=$1
shift
IFS=, read -ra gpus <<< "${CUDA_VISIBLE_DEVICES:-}"
if [ "${#gpus[@]}" -lt 2 ] && [ -z "${REFLOGP_ON_CPU:-}" ]; then
    echo "the service and the run need a GPU each, but CUDA_VISIBLE_DEVICES is '${CUDA_VISIBLE_DEVICES:-}'; set REFLOGP_ON_CPU=1" \
        "to run both without GPUs" >&2
    exit 2
fi
export no_proxy="127.0.0.1${no_proxy:+,$no_proxy}"
folder=$(mktemp -d)  # for this job only: the service's jobs, log and token
REFLOGP_TOKEN="reflogp_$(head -c 24 /dev/urandom | base64 | tr -d '+/=\n')"
digest=$(printf %s "$REFLOGP_TOKEN" | sha256sum | cut -d ' ' -f 1)
export REFLOGP_TOKEN
export REFLOGP_TOKENS="[{\"name\": \"job\", \"sha256\": \"$digest\", \"scopes\": [\"admin\"]}]"

CUDA_VISIBLE_DEVICES=${gpus[0]:-} reflogp serve --model "ref=$model" --dtype "${REFLOGP_DTYPE:-auto}" \
    --store "${REFLOGP_STORE:-./logps}" --state "$folder/state" --port 0 2> "$folder/log" &
service=$!
end() {
    kill "$service" 2> /dev/null || { echo "the service ended before the run:"; tail -n 50 "$folder/log"; } >&2
    wait "$service" || true
    rm -rf "$folder"
}
trap end EXIT

deadline=$((SECONDS + ${REFLOGP_START_SECONDS:-3600}))
until REFLOGP_URL=$(grep -o -m 1 'http://[0-9.:]*' "$folder/log") && curl --noproxy '*' --silent --fail --output /dev/null "$REFLOGP_URL/readyz"; do
    kill -0 "$service" 2> /dev/null || exit 1
    [ $SECONDS -lt $deadline ] || { echo "the service was not ready in time" >&2; cat "$folder/log" >&2; exit 1; }
    sleep 1
done
export REFLOGP_URL
unset REFLOGP_TOKENS REFLOGP_STORE
rest=$(IFS=,; echo "${gpus[*]:1}")
CUDA_VISIBLE_DEVICES=$rest "$@"
