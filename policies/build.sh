#!/bin/sh
# Builds every policy to WebAssembly and writes the modules with their checksums to policies/dist.
#
#   policies/build.sh               build into policies/dist
#   policies/build.sh --out DIR     build into DIR instead; tests then run on it (TURNSTILE_POLICIES_DIR=DIR)
#
# Uses the wasm32-unknown-unknown target of rustup's toolchain where it is installed
# (`rustup target add wasm32-unknown-unknown`), else the toolchain of Debian's rustc-web, for which a root user's missing
# packages are installed. wasm-opt (binaryen), where there is one, makes the modules smaller and faster.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
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

target=wasm32-unknown-unknown
export CARGO_TARGET_DIR="$here/target"
# One job unless told otherwise: with lto and one code generation unit more bring little.
export CARGO_BUILD_JOBS="${CARGO_BUILD_JOBS:-1}"
# Panic messages name source files: give them names that are the same on every machine.
cargo_home=${CARGO_HOME:-$HOME/.cargo}
separator=$(printf '\037')
CARGO_ENCODED_RUSTFLAGS="--remap-path-prefix=$here=policies${separator}--remap-path-prefix=$cargo_home/registry/src=crates"
export CARGO_ENCODED_RUSTFLAGS
cd "$here"

if command -v rustup >/dev/null 2>&1 && rustup target list --installed 2>/dev/null | grep -qx "$target"; then
    echo "build.sh: rustup toolchain, target $target"
    cargo build --release --locked --target "$target"
else
    packages="rustc-web cargo-web rust-web-src lld-19 binaryen"
    missing=
    for package in $packages; do
        dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q "ok installed" || missing="$missing $package"
    done
    if [ -n "$missing" ]; then
        if command -v apt-get >/dev/null 2>&1 && [ "$(id -u)" = 0 ]; then
            # shellcheck disable=SC2086 # a list of packages
            apt-get update -qq >&2 && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends $missing >&2
        else
            echo "build.sh: no WebAssembly target. Either: rustup target add $target" >&2
            echo "build.sh: or, on Debian, as root: apt-get install -y --no-install-recommends$missing" >&2
            exit 1
        fi
    fi
    echo "build.sh: Debian toolchain, $(/usr/bin/rustc --version), standard library from source"
    # The standard library for this target comes as source, which cargo builds only with its unstable flag.
    (
        unset RUSTUP_TOOLCHAIN RUSTUP_HOME CARGO RUSTDOC || true
        export PATH="/usr/bin:/bin" RUSTC=/usr/bin/rustc RUSTC_BOOTSTRAP=1
        CARGO_ENCODED_RUSTFLAGS="$CARGO_ENCODED_RUSTFLAGS${separator}--remap-path-prefix=/usr/lib/rustlib/src/rust=rust"
        export CARGO_TARGET_WASM32_UNKNOWN_UNKNOWN_LINKER=/usr/bin/wasm-ld-19
        /usr/bin/cargo build --release --locked --target "$target" -Zbuild-std=std,panic_abort
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
place hello test/hello.wasm
place noop test/noop.wasm
place shapes test/shapes.wasm

cd "$dist"
sha256sum priority-queue.wasm session-binding.wasm kv-affinity.wasm tenant-labels.wasm test/hello.wasm test/noop.wasm test/shapes.wasm >SHA256SUMS
while read -r sum file; do
    printf '%9d bytes  %s  %s\n' "$(wc -c <"$file")" "$sum" "$file"
done <SHA256SUMS
