#!/usr/bin/env bash
# Runs the modules of a package of other people's Proxy-Wasm plugins on Turnstile, as they are: each is held against its
# checksum, gets real requests in front of simulated workers, and has to do what it is for.
# Usage: run.sh [--only NAME]      TURNSTILE_BIN names another binary than target/debug/turnstile; TURNSTILE_THIRD_PARTY_HOME is
# where the package (27 MB) and the compiled modules are kept. Needs Python 3.11 with pip, and a redis-server.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
target=${CARGO_TARGET_DIR:-$root/target}
binary=${TURNSTILE_BIN:-$target/debug/turnstile}
[ -x "$binary" ] || { echo "no gateway at $binary: run 'make build' first" >&2; exit 1; }
home=${TURNSTILE_THIRD_PARTY_HOME:-${XDG_CACHE_HOME:-$HOME/.cache}/turnstile-third-party}
python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "this needs Python 3.11 or newer (PYTHON names it)" >&2; exit 1; }
"$root/scripts/redis.sh"

package=gpustack-higress-plugins==0.5.1
wheel=gpustack_higress_plugins-0.5.1-py3-none-any.whl
digest=d233f22b3825258505406a07157f489f670f7b1b67473c1c8ded0389d3b4cdb2
mkdir -p "$home"
if ! echo "$digest  $home/$wheel" | sha256sum --check --status 2>/dev/null; then
  "$python" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: --dest "$home" "$package"
fi
echo "$digest  $home/$wheel" | sha256sum --check --quiet
rm -rf "$home/modules"
"$python" - "$home/$wheel" "$home/modules" <<'PYTHON'
import pathlib, sys, zipfile
prefix = "gpustack_higress_plugins/plugins/"
with zipfile.ZipFile(sys.argv[1]) as wheel:
    for name in wheel.namelist():
        if name.startswith(prefix) and name.endswith(".wasm"):
            to = pathlib.Path(sys.argv[2], name.removeprefix(prefix))
            to.parent.mkdir(parents=True)
            to.write_bytes(wheel.read(name))
PYTHON
(cd "$home/modules" && sha256sum --check --quiet --strict "$here/SHA256SUMS")
export PYTHONDONTWRITEBYTECODE=1 PYTHONPATH="$here/../python"
exec "$python" "$here/check.py" --turnstile "$binary" --modules "$home/modules" \
  --state "$home/state" --sums "$here/SHA256SUMS" "$@"
