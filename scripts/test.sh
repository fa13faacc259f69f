#!/usr/bin/env bash
# Sets up `.venv` and runs every test that needs no GPU and not minutes on its own, the files spread over the cores in
# their order, which has the engine's, the longest, near the beginning.
# Arguments go to pytest, where a later -m takes the place of this one: scripts/test.sh -k budget; scripts/test.sh -m slow
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup_env.sh
exec .venv/bin/pytest -m 'not gpu and not slow' -n auto --maxprocesses=4 --dist loadfile --no-loadscope-reorder "$@"
