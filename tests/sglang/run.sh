#!/usr/bin/env bash
# Installs SGLang (setup.sh) and runs the conversation against it through the gateway.
# Usage: run.sh [--keep DIRECTORY] [FLOW ...]      TURNSTILE_BIN names another binary than target/debug/turnstile.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
target=${CARGO_TARGET_DIR:-$root/target}
binary=${TURNSTILE_BIN:-$target/debug/turnstile}
[ -x "$binary" ] || { echo "no gateway at $binary: run 'make build' first" >&2; exit 1; }
export TURNSTILE_SGLANG_HOME=${TURNSTILE_SGLANG_HOME:-${XDG_CACHE_HOME:-$HOME/.cache}/turnstile-sglang}
"$here/setup.sh"
PYTHONDONTWRITEBYTECODE=1 exec "$TURNSTILE_SGLANG_HOME/venv/bin/python" "$here/conversation.py" --gateway "$binary" "$@"
