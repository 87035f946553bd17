#!/usr/bin/env bash
# Fuzzes every target (or those named) for FUZZ_SECONDS each, from the committed corpus. What it finds beyond that corpus stays
# in the target directory and is where the next run begins; a failing input is kept in artifacts/ there and its path printed.
# Needs a nightly toolchain; installs cargo-fuzz.
set -euo pipefail
cd "$(dirname "$0")/../fuzz"
seconds=${FUZZ_SECONDS:-60}
version=0.13.2
work=$(cd .. && mkdir -p "${CARGO_TARGET_DIR:-target}/fuzz" && cd "${CARGO_TARGET_DIR:-target}/fuzz" && pwd)

if ! command -v rustup >/dev/null || ! rustup run nightly rustc -V >/dev/null 2>&1; then
  echo "fuzzing needs a nightly Rust toolchain (libFuzzer's coverage is an unstable option of the compiler):" >&2
  echo "  rustup toolchain install nightly --profile minimal" >&2
  echo "The committed corpus and mutations of it run without one: cargo nextest run -p turnstile-tests --test fuzz" >&2
  exit 1
fi
cargo fuzz --version 2>/dev/null | grep -q "$version" || cargo install --locked --quiet cargo-fuzz --version "$version"

dictionary() {
  case $1 in
    sse_observe) echo sse ;;
    config) echo config ;;
    hostcalls) echo hostcalls ;;
    *) echo body ;;
  esac
}

targets=("$@")
[ ${#targets[@]} -gt 0 ] || mapfile -t targets < <(find fuzz_targets -name '*.rs' -exec basename {} .rs \; | sort)
# The code under test has no unsafe block, so there is nothing for an address sanitizer to find, and it halves the speed.
export CARGO_TARGET_DIR=$work/build
cargo +nightly fuzz build --sanitizer none
host=$(rustc +nightly -vV | sed -n 's/^host: //p')
for target in "${targets[@]}"; do
  mkdir -p "$work/corpus/$target" "$work/artifacts/$target"
  echo "== $target, $seconds s"
  "$work/build/$host/release/$target" "$work/corpus/$target" "corpus/$target" -max_total_time="$seconds" -max_len=8192 \
    -timeout=10 -rss_limit_mb=2048 -print_final_stats=1 -dict="dictionaries/$(dictionary "$target").dict" \
    -artifact_prefix="$work/artifacts/$target/" </dev/null
done
