#!/usr/bin/env bash
# Everything that is measured on a CUDA device, one JSON file each, into benchmarks/runs/DATE/.
# Usage: tools/gpu_benchmarks.sh [PYTHON]
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:-.venv/bin/python}
out=benchmarks/runs/$(date -u +%F-%H%M)
target=smollm2-135m-instruct
mkdir -p "$out"

measure() {
    local name=$1 tool=$2
    shift 2
    echo "== $name"
    "$python" "tools/$tool.py" "$@" --out "$out/$name.json"
}

measure decode-smollm2 measure_decoding --target $target
measure decode-8b-shape measure_decoding --shape llama-8b --rate 0.777 --sibling 0.3 \
    --ways plain,5x1x5,adaptive --tree 6x4x24
measure target-pass-smollm2 measure_target_pass --target $target --tokens 1,8,32,64,128,256
measure target-pass-8b measure_target_pass --shape llama-8b --tokens 1,8,32,64,128,256,512
measure paged-attention measure_paged_attention
measure training-step measure_training_step
measure capture-smollm2 measure_capture --target $target --tokens 5242880 \
    --pass-tokens 65536 --rounds 1 --formats q5 --target-format hidden
measure capture-8b measure_capture --shape llama-8b --tokens 131072 --rounds 2 --formats exact,q8,q5
echo "measured: $out"
