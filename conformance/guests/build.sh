#!/bin/sh
# Builds the probe's variants to WebAssembly, with their checksums.
#
#   conformance/guests/build.sh               build into conformance/guests
#   conformance/guests/build.sh --out DIR     build into DIR instead; the kit then takes them from there
#                                             (turnstile-conformance --guests DIR, or CONFORMANCE_GUESTS=DIR)
#
# Needs clang with the wasm32 target, and wasm-ld, of version 19; on Debian, root gets them installed.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
out=$here
case ${1:-} in
"") ;;
--out)
    [ -n "${2:-}" ] || { echo "build.sh: --out needs a directory" >&2; exit 2; }
    mkdir -p "$2"
    out=$(cd "$2" && pwd)
    ;;
*)
    echo "usage: conformance/guests/build.sh [--out DIR]" >&2
    exit 2
    ;;
esac

missing=
for package in clang-19 lld-19; do
    command -v "$package" >/dev/null 2>&1 || missing="$missing $package"
done
if [ -n "$missing" ]; then
    if command -v apt-get >/dev/null 2>&1 && [ "$(id -u)" = 0 ]; then
        # shellcheck disable=SC2086 # a list of packages
        apt-get update -qq >&2 && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends $missing >&2
    else
        echo "build.sh: missing$missing; on Debian, as root: apt-get install -y --no-install-recommends$missing" >&2
        exit 1
    fi
fi

cd "$here"
# build VARIANT FLAG...
build() {
    name=$1
    shift
    clang-19 --target=wasm32 -std=c11 -Os -Wall -Wextra -Werror -Wno-int-to-pointer-cast -ffreestanding -nostdlib \
        -fuse-ld="$(command -v wasm-ld-19)" -Wl,--no-entry -Wl,--strip-all -Wl,-z,stack-size=131072 "$@" \
        -o "$out/$name.wasm" probe.c
}

build probe
build probe-0.1.0 -DABI_0_1_0
build probe-0.2.0 -DABI_0_2_0
build probe-higress -DHIGRESS
build probe-wasi -DWASI

cd "$out"
sha256sum probe.wasm probe-0.1.0.wasm probe-0.2.0.wasm probe-higress.wasm probe-wasi.wasm >SHA256SUMS
cat SHA256SUMS
