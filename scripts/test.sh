#!/usr/bin/env bash
# All tests: the policies' natively, then the workspace's, with their documentation examples. Uses cargo-nextest where it is
# installed, else cargo test.
set -euo pipefail
cd "$(dirname "$0")/.."
target=${CARGO_TARGET_DIR:-target}
scripts/redis.sh
if cargo nextest --version >/dev/null 2>&1; then
  cargo nextest run --locked --manifest-path policies/Cargo.toml --target-dir "$target/policies" "$@"
  cargo test --locked --quiet --doc --workspace
  cargo nextest run --locked --workspace "$@"
else
  cargo test --locked --manifest-path policies/Cargo.toml --target-dir "$target/policies"
  cargo test --locked --workspace
fi
