#!/usr/bin/env bash
# Sets up `.venv`, serves the demo model on the CPU with `lmdeploy serve api_server ... --focus --device cpu`, asks five
# held-out questions, and compares focus with stock and with the delayed cache alone. --json prints one JSON object.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup_env.sh >&2
exec .venv/bin/python scripts/quickstart.py "$@"
