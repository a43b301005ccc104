#!/usr/bin/env bash
# Everything that is measured on a CUDA device, one JSON file each, into benchmarks/runs/DATE/.
# Usage: [HEAD=DIR] [COMMIT=ID] tools/gpu_benchmarks.sh [PYTHON] [NAME...]
#
# HEAD is a trained head of the small target; without it a random one stands for it. Names choose
# what is measured (`profile-8b`, `vllm`, ...); without any, all is. Every measurement has a time
# limit and writes what it has after every cell; one that fails does not stop the others.
set -uo pipefail
cd "$(dirname "$0")/.."
python=${1:-.venv/bin/python}
shift
chosen=" $* "
out=${OUT:-benchmarks/runs/$(date -u +%F-%H%M)}
target=smollm2-135m-instruct
with_head=()
[ -n "${HEAD:-}" ] && with_head=(--head "$HEAD")
with_commit=()
[ -n "${COMMIT:-}" ] && with_commit=(--commit "$COMMIT")
failed=()
mkdir -p "$out"

measure() { # NAME LIMIT_S TOOL OPTION...
    local name=$1 limit=$2 tool=$3
    shift 3
    if [ "$chosen" != "  " ] && [ "${chosen/ $name /}" = "$chosen" ]; then return; fi
    echo "== $name"
    local started=$SECONDS
    timeout "$limit" "$python" "tools/$tool.py" "$@" "${with_commit[@]}" --out "$out/$name.json" ||
        failed+=("$name")
    echo "== $name took $((SECONDS - started)) s"
}

# Does the host stand in the way?
measure profile-smollm2 120 profile_cycles --target $target "${with_head[@]}"
measure profile-8b 150 profile_cycles --shape llama-8b
measure overlap-smollm2 120 measure_overlap --target $target "${with_head[@]}"
measure overlap-8b 150 measure_overlap --shape llama-8b
measure first-token-smollm2 90 measure_first_token --target $target "${with_head[@]}"
measure first-token-8b 120 measure_first_token --shape llama-8b

# Tokens a second.
measure decode-smollm2 180 measure_decoding --target $target
measure decode-8b-shape 420 measure_decoding --shape llama-8b --rate 0.777 --sibling 0 \
    --ways adaptive,plain,5x1x5 --tree 5x1x5 --largest 5x1x5=64
measure long-context-8b 150 measure_long_context --shape llama-8b-long
measure experts 90 measure_experts --shape qwen3-moe-12-layers
measure decode-experts 120 measure_decoding --shape qwen3-moe-12-layers --rate 0.777 \
    --sibling 0.3 --ways plain,5x1x5,adaptive --tree 6x4x24 --sizes 1,8,32 --answer-len 128

# A head that is always wrong, under the controller.
measure never-slower 90 measure_decoding --target $target --ways plain,adaptive --sizes 1,8,32 \
    --rounds 6

# Requests that come and go all the time.
measure joining-smollm2 150 measure_joining --target $target
measure joining-8b 240 measure_joining --shape llama-8b --in-flight 64 --requests 384 \
    --answer-len 128

# The same machine and hour for vLLM, where it is installed beside fledge.
if "$python" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("vllm") is None)'; then
    measure vllm 480 compare_vllm run --subject smollm2=$target:0 \
        --subject 8b=llama-8b:0,5,3,1,2,4 --at-once 5 --largest 5=64,4=64,3=128 --rounds 2
fi

# Is the text the same?
measure near-ties-bfloat16 120 measure_near_ties --target $target --dtype bfloat16 "${with_head[@]}"
measure near-ties-float32 180 measure_near_ties --target $target --dtype float32 "${with_head[@]}"

# Passes and kernels.
measure target-pass-smollm2 90 measure_target_pass --target $target --tokens 1,8,32,64,128,256
measure target-pass-8b 120 measure_target_pass --shape llama-8b --tokens 1,8,32,64,128,256,512
measure paged-attention 180 measure_paged_attention

# Training and capturing.
measure training-step 180 measure_training_step
measure capture-smollm2 180 measure_capture --target $target --tokens 5242880 \
    --pass-tokens 65536 --rounds 1 --formats q5 --target-format hidden
measure capture-8b 180 measure_capture --shape llama-8b --tokens 131072 --rounds 2 \
    --formats exact,q8,q5

echo "measured: $out"
if [ ${#failed[@]} -gt 0 ]; then
    echo "failed or out of time: ${failed[*]}" >&2
    exit 1
fi
