#!/usr/bin/env bash
# Measure and test reflogp on a machine with one GPU, in less than 10 minutes. CONTRIBUTING.md describes the files that this
# writes to $OUT, by default ./gpu-first. Each step writes its results as they come: a later step that fails or is stopped loses
# none of them.
#
#   tools/gpu_first.sh                 # PYTHON=… chooses another interpreter than python3
#   tools/gpu_first.sh --device cpu    # a trial of this script on a CPU, in a few minutes
set -uo pipefail
mkdir -p "${OUT:=gpu-first}"
OUT=$(cd "$OUT" && pwd)
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
export OUT PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 PYTHONPATH=store:scoring:service:client:cli:trainer_ext
case "$*" in
    "")
        quick=(--shapes 7B 0.5B --tokens 400000) tests=(tests/gpu -n 8) benchmark=(--minutes 4.4 --rounds 2)
        ;;
    "--device cpu")
        export REFLOGP_GPU_TESTS_DEVICE=cpu
        quick=(--device cpu --shapes tiny) tests=(tests/gpu/test_online.py -n 1) benchmark=("${quick[@]}" --rounds 1)
        ;;
    *)
        echo "usage: tools/gpu_first.sh [--device cpu]" >&2
        exit 2
        ;;
esac

nvidia-smi > "$OUT/machine.txt" 2>&1
nvidia-smi --query-gpu=timestamp,clocks.sm,power.draw,temperature.gpu,memory.used --format=csv -lms 1000 > "$OUT/clocks.csv" 2>&1 &
trap 'kill $! 2> /dev/null' EXIT

# step NAME SECONDS SIGNAL ARGUMENTS…: run python for at most SECONDS, then send SIGNAL; the output goes to NAME.log.
failed=0 summary=
step() {
    echo "$SECONDS s: $1 begins" | tee "$OUT/$1.log"
    timeout --signal "$3" --kill-after 9 "$2" "${PYTHON:-python3}" "${@:4}" 2>&1 | tee -a "$OUT/$1.log"
    local status=${PIPESTATUS[0]}
    echo "$SECONDS s: $1 ended with status $status" | tee -a "$OUT/$1.log"
    [ "$status" = 0 ] || failed=1
    summary+="$1: status $status"$'\n'
}

step quick 110 TERM benchmarks/gpu.py --quick "${quick[@]}"
# Services and the command line set the allocator so; gpu.py does it itself. An interrupted pytest still prints its summary.
PYTORCH_ALLOC_CONF=expandable_segments:True TORCHINDUCTOR_COMPILE_THREADS=2 \
    step tests 150 INT -m pytest -m gpu "${tests[@]}" -rfEs -p no:cacheprovider --durations=8
step benchmark 300 TERM benchmarks/gpu.py "${benchmark[@]}"
echo "${summary}results: $OUT (status 124: stopped at its limit)"
exit $failed
