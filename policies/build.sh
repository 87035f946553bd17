#!/bin/sh
# Builds every policy to WebAssembly and writes the modules with their checksums to policies/dist.
#
#   policies/build.sh               build into policies/dist
#   policies/build.sh --out DIR     build into DIR instead; tests then run on it (TURNSTILE_POLICIES_DIR=DIR)
#
# Uses the wasm32-unknown-unknown target of rustup's toolchain where it is installed
# (`rustup target add wasm32-unknown-unknown`), else the toolchain of Debian's rustc-web; Go, clang and npm for the example
# in other languages. What is missing is installed as toolchains.sh says. wasm-opt (binaryen), where there is one, makes the
# modules of Rust smaller and faster.
set -eu

. "$(dirname "$0")/toolchains.sh"
dist=$here/dist
case ${1:-} in
"") ;;
--out | --check)
    [ -n "${2:-}" ] || { echo "build.sh: $1 needs a directory" >&2; exit 2; }
    mkdir -p "$2"
    dist=$(cd "$2" && pwd)
    ;;
*)
    echo "usage: policies/build.sh [--out DIR]" >&2
    exit 2
    ;;
esac

export CARGO_TARGET_DIR="$here/target"
# One job unless told otherwise: with lto and one code generation unit more bring little.
export CARGO_BUILD_JOBS="${CARGO_BUILD_JOBS:-1}"
stable_paths
cd "$here"

if has_rustup_target; then
    echo "build.sh: rustup toolchain, target $target"
    cargo build --release --locked --target "$target"
else
    (
        debian_rust
        echo "build.sh: Debian toolchain, $(/usr/bin/rustc --version), standard library from source"
        # shellcheck disable=SC2086 # a list of flags
        "$CARGO" build --release --locked --target "$target" $CARGO_FLAGS
    )
fi

# place CRATE_FILE DESTINATION
place() {
    module=$CARGO_TARGET_DIR/$target/release/$1.wasm
    mkdir -p "$(dirname "$dist/$2")"
    if command -v wasm-opt >/dev/null 2>&1; then
        wasm-opt -O3 --strip-debug --strip-producers "$module" -o "$dist/$2"
    else
        cp "$module" "$dist/$2"
    fi
}

place priority_queue priority-queue.wasm
place session_binding session-binding.wasm
place kv_affinity kv-affinity.wasm
place tenant_labels tenant-labels.wasm
place short_first short-first.wasm
place hello test/hello.wasm
place listener test/listener-rust.wasm
place noop test/noop.wasm
place shapes test/shapes.wasm

place warm_balance examples/warm-balance-rust.wasm

# The same policy in other languages, each in a project like those of `turnstile plugin new`.
# lay LANGUAGE SDK_FILES... : lays the project out and builds it, then the test guest that has its own sources in it
lay() {
    language=$1
    shift
    project=$here/target/projects/$language
    mkdir -p "$project/turnstile"
    cp "$@" "$project/turnstile"
    lay_one "$here/examples/warm-balance/$language" "examples/warm-balance-$language.wasm"
    lay_one "$here/test-guests/listener/$language" "test/listener-$language.wasm"
}

# lay_one SOURCES DESTINATION : builds the project with these sources on top
lay_one() {
    cp -r "$1/." "$project"
    rm -f "$project/build/warm-balance.wasm"
    make -s -C "$project" all
    cp "$project/build/warm-balance.wasm" "$dist/$2"
}

find_clang
lay c "$here"/sdk-c/turnstile.h
find_go
lay go "$here"/sdk-go/*.go
(
    cd "$here/test-guests/noop-go"
    GOOS=wasip1 GOARCH=wasm "$GO" build -trimpath -buildvcs=false -ldflags "-s -w -buildid=" -buildmode=c-shared \
        -o "$dist/test/noop-go.wasm" .
)
find_npm
lay as "$here"/sdk-as/*.ts

cd "$dist"
sha256sum priority-queue.wasm session-binding.wasm kv-affinity.wasm tenant-labels.wasm short-first.wasm examples/*.wasm test/*.wasm >SHA256SUMS
while read -r sum file; do
    printf '%9d bytes  %s  %s\n' "$(wc -c <"$file")" "$sum" "$file"
done <SHA256SUMS
