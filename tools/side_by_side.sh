#!/usr/bin/env bash
# Several recipes at once on one GPU: a small target leaves most of it idle while one process works.
#
#   [PYTHON=FILE] tools/side_by_side.sh OUT RECIPE.toml...     each as `fledge run RECIPE --out OUT/NAME`
#
# Processes share the GPU by CUDA's MPS where its control program is installed. What each says goes to
# OUT/NAME.log. The same command goes on where it was interrupted. Give each recipe a seed of its own,
# and a regenerate.cache_tokens: by default an engine takes all memory that is free.
set -uom pipefail  # with job control, or what runs beside would ignore SIGINT

if [ $# -lt 2 ]; then
    sed -n '2,9s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
    exit 2
fi
python=${PYTHON:-$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)/.venv/bin/python}
out=$1
shift
mkdir -p "$out" || exit 2

names=$(for recipe in "$@"; do basename "$recipe" .toml; done | sort | uniq -d)
if [ -n "$names" ]; then
    echo "error: several recipes are called $(echo $names); their results would share a directory." >&2
    exit 2
fi

# A server that was there before is left as it is.
has_server=false
if command -v nvidia-cuda-mps-control >/dev/null && ! pgrep -x nvidia-cuda-mps >/dev/null; then
    nvidia-cuda-mps-control -d >/dev/null && has_server=true
fi

declare -A recipe_of
for recipe in "$@"; do
    name=$(basename "$recipe" .toml)
    "$python" -m fledge run "$recipe" --out "$out/$name" >"$out/$name.log" 2>&1 &
    recipe_of[$!]=$name
done
# One that is killed would take down all that share the GPU with it: they are asked, and end by themselves.
trap 'kill -INT "${!recipe_of[@]}" 2>/dev/null' INT TERM

failed=0
for process in "${!recipe_of[@]}"; do
    name=${recipe_of[$process]}
    # A signal ends `wait`, not the process.
    until wait "$process"; status=$?; ! kill -0 "$process" 2>/dev/null; do :; done
    if [ $status -eq 0 ]; then
        echo "$name: done"
    else
        failed=1
        echo "$name: exit $status: $(tail -n 1 "$out/$name.log")" >&2
    fi
done
if $has_server; then echo quit | nvidia-cuda-mps-control >/dev/null; fi
exit $failed
