#!/usr/bin/env bash
# Makes or updates `.venv` in this clone: LMDeploy with its real dependencies, this package (editable) and what its
# tests need. Returns at once when nothing that it depends on has changed. PYTHON=... chooses the interpreter.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=.venv
stamp=$venv/setup.stamp
log=$venv/setup.log
newest=13  # LMDeploy 0.18 has wheels for Python 3.10 to 3.13

say() { printf '[setup %3d s] %s\n' "$SECONDS" "$*"; }
fail() { printf 'setup: %s\n' "$*" >&2; exit 1; }

usable() {  # usable PYTHON: runs, has a version that LMDeploy is built for, and can make a venv
    "$1" -c "import ensurepip, sys, venv; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, $newest))" 2>/dev/null
}

find_python() {
    if [ -n "${PYTHON:-}" ]; then
        usable "$PYTHON" || fail "PYTHON=$PYTHON is not Python 3.10 to 3.$newest with venv and ensurepip"
        echo "$PYTHON"
        return
    fi
    local candidate
    for candidate in python3 python python3.12 python3.11 python3.10 python3.13; do
        if usable "$candidate"; then echo "$candidate"; return; fi
    done
    fail "no Python 3.10 to 3.$newest with venv and ensurepip on PATH; set PYTHON=/path/to/python3"
}

with_progress() {  # runs pip, its output in the log; every 10 seconds, how far it is
    local line last=starting shown=$SECONDS status total=
    "$@" 2>&1 | tee "$log" | while true; do
        status=0
        IFS= read -r -t 10 line || status=$?
        if [ "$status" -eq 0 ]; then
            case $line in
                WARNING*|DEPRECATION*|'') ;;
                'Installing collected packages: '*) line=${line#*: }; line=${line//[^,]/}; total=$((${#line} + 1)) ;;
                *) last=${line%% (from *} ;;
            esac
        elif [ "$status" -le 128 ]; then  # the end of the output; more than 128 is the time-out
            break
        fi
        if [ -n "$total" ]; then last="installed $(installed) of $total packages"; fi
        if [ $((SECONDS - shown)) -ge 10 ]; then say "  ${last:0:90}"; shown=$SECONDS; fi
    done
}

installed() { find "$venv"/lib/python*/site-packages -maxdepth 1 -name '*.dist-info' | wc -l; }

inputs() { pwd; "$venv/bin/python" --version; cat setup.py pyproject.toml scripts/setup_env.sh; }

if [ -e "$venv" ] && ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    say "$venv has no working Python: making it again"
    rm -rf "$venv"
fi
if [ ! -e "$venv" ]; then
    python=$(find_python)
    say "making $venv with $("$python" --version) ($python)"
    "$python" -m venv "$venv"
fi
if [ "$(cat "$stamp" 2>/dev/null)" = "$(inputs | cksum)" ]; then
    say "$venv is up to date"
    exit
fi
rm -f "$stamp"
say "installing LMDeploy and what it needs from the package index, several GB the first time (log: $log)"
if ! with_progress "$venv/bin/python" -m pip install --no-input --progress-bar off -e '.[test]'; then
    tail -n 30 "$log" >&2
    fail "pip failed; the end of $log is above"
fi
inputs | cksum >"$stamp"
say "$venv is ready"
