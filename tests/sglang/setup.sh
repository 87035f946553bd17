#!/usr/bin/env bash
# Installs what start.sh needs into $TURNSTILE_SGLANG_HOME (default ~/.cache/turnstile-sglang): a Python 3.11 venv with the
# SGLang 0.5.23 wheel, about 6 GB and a few minutes once (PyPI's torch is the CUDA build), and a tiny model.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
home=${TURNSTILE_SGLANG_HOME:-${XDG_CACHE_HOME:-$HOME/.cache}/turnstile-sglang}

mkdir -p "$home"
exec 9>"$home/lock"
flock 9 # two at once would install into each other

if [ ! -f "$home/ready" ]; then
  python=
  for candidate in ${PYTHON:-} python3.11 python3; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
      python=$candidate
      break
    fi
  done
  [ -n "$python" ] || { echo "Python 3.11 is needed for SGLang; name it with PYTHON=/path/to/python3.11" >&2; exit 1; }
  echo "installing SGLang 0.5.23 into $home (once, about 6 GB)" >&2
  "$python" -m venv "$home/venv"
  "$home/venv/bin/pip" install --quiet --disable-pip-version-check -r "$here/requirements.txt"
  # Without its dependencies: the compiled kernels (and what needs them) do not run without a GPU.
  "$home/venv/bin/pip" install --quiet --disable-pip-version-check --no-deps sglang==0.5.23
  touch "$home/ready"
fi
"$home/venv/bin/python" "$here/model/make.py" "$home/tiny"
