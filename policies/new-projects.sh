#!/bin/sh
# Makes a project of every language with `turnstile plugin new`, builds it and runs its tests, as its author would.
#
#   policies/new-projects.sh TURNSTILE
set -eu
. "$(dirname "$0")/toolchains.sh"
[ -x "${1:-}" ] || { echo "usage: policies/new-projects.sh TURNSTILE" >&2; exit 2; }
TURNSTILE=$(cd "$(dirname "$1")" && pwd)/$(basename "$1")
export TURNSTILE
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

# passes LANGUAGE: makes a project and runs its tests
passes() {
    echo "new-projects.sh: $1"
    "$TURNSTILE" plugin new "my-$1" --lang "$1" --dir "$folder" >/dev/null
    make -s -C "$folder/my-$1" test
}

find_clang
passes c
find_go
passes go
find_npm
passes as
# What is common with the policies of this folder is not built again: same place, same flags.
export CARGO_TARGET_DIR="$here/target"
stable_paths
if has_rustup_target; then
    passes rust
else
    (
        debian_rust
        passes rust
    )
fi
