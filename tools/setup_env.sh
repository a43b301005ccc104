#!/usr/bin/env bash
# Makes .venv: finds Python, installs torch at its pinned version, then fledge with its tools.
#
# Repeating it is free: a stamp, written last, says for which pyproject.toml and constraints.txt the
# environment was made. An environment in which an installation was cut short is made again from
# scratch, since a half-installed package cannot be told from a whole one.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$(pwd -P)
venv=$root/.venv
stamp=$venv/.fledge-ready
unfinished=$venv/.fledge-installing

say() { printf '%s\n' "$*" >&2; }
fail() { say "error: $*"; exit 1; }
trap 'say "interrupted; run make again to go on"; exit 130' INT

# Prints the first Python that fledge supports. Running it is the only proof: some systems put
# names on the PATH that lead nowhere.
find_python() {
    local name
    for name in ${PYTHON:-python3.12 python3.11 python3 python}; do
        if "$name" -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' \
            >/dev/null 2>&1; then
            command -v "$name"
            return
        fi
    done
    fail "no Python 3.11 or 3.12 found (tried: ${PYTHON:-python3.12 python3.11 python3 python})." \
        "Install one, or name it: make PYTHON=/path/to/python3.12 ..."
}

fingerprint() {
    cat pyproject.toml constraints.txt tools/setup_env.sh | cksum
}

is_ready() {
    [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$(fingerprint)" ] && is_sound
}

# The environment runs a supported Python, has pip, lies where it was made (its programs name their
# interpreter by its full path), and no installation in it was cut short.
is_sound() {
    [ ! -e "$unfinished" ] &&
        "$venv/bin/python" -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' \
            >/dev/null 2>&1 &&
        head -n 3 "$venv/bin/pip" 2>/dev/null | grep -qF "$venv/bin/"
}

make_venv() {
    local python
    python=$(find_python)
    say "making .venv with $("$python" --version)"
    "$python" -m venv --clear "$venv" >&2 ||
        fail "$python could not make a virtual environment. On Debian and Ubuntu the package" \
            "python3-venv is needed; then run make again."
}

install() {
    local quiet=()
    [ -t 2 ] || quiet=(--quiet)
    # Python compiles what it imports; compiling everything beforehand takes a minute.
    "$venv/bin/python" -m pip install --disable-pip-version-check --no-compile \
        ${quiet[@]+"${quiet[@]}"} "$@" >&2 ||
        fail "pip could not install ($*). Its message is above; after solving it, run make again."
}

is_ready && exit 0

# Two makes at once: the second waits, then finds the work done. Any file can carry the lock.
if command -v flock >/dev/null; then
    exec 9<pyproject.toml
    flock -n 9 || { say "another make is setting up .venv; waiting for it"; flock 9; }
    is_ready && exit 0
fi

# These would send packages somewhere else than into the environment.
unset PIP_USER PIP_TARGET PIP_PREFIX PIP_ROOT

is_sound || make_venv
rm -f "$stamp"
: >"$unfinished"
torch=$(grep -E '^torch==' constraints.txt)
say "installing $torch (the large part; only the first time)"
install "$torch"
say "installing fledge and its tools"
install --constraint constraints.txt --editable '.[dev]'
rm -f "$unfinished"
fingerprint >"$stamp.new"
mv "$stamp.new" "$stamp"
say ".venv is ready"
