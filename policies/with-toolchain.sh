#!/bin/sh
# Runs a command where the compiler of a language is found, as an author's shell has it; what is missing is installed as
# toolchains.sh says.
#
#   policies/with-toolchain.sh rust|go|as|c COMMAND...
set -eu
. "$(dirname "$0")/toolchains.sh"
language=${1:-}
[ $# -ge 2 ] || { echo "usage: policies/with-toolchain.sh rust|go|as|c COMMAND..." >&2; exit 2; }
shift
case $language in
c) find_clang ;;
go) find_go ;;
as) find_npm ;;
rust)
    # What is common with the policies of this folder is not built again: same place, same flags.
    export CARGO_TARGET_DIR="$here/target"
    stable_paths
    has_rustup_target || {
        own=$PATH
        debian_rust
        # The rest of what the author has stays there.
        PATH=$PATH:$own
    }
    ;;
*)
    echo "with-toolchain.sh: no language $language: rust, go, as or c" >&2
    exit 2
    ;;
esac
exec "$@"
