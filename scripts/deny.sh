#!/usr/bin/env bash
# Licences always; advisories when their database can be had (it is a git repository, which closed networks may refuse).
set -euo pipefail
cd "$(dirname "$0")/.."
if ! command -v cargo-deny >/dev/null; then
  cargo install --locked --quiet cargo-deny --version 0.20.2
fi
for manifest in Cargo.toml policies/Cargo.toml; do
  cargo deny --locked --config deny.toml --manifest-path "$manifest" check --hide-inclusion-graph licenses bans sources
done
if timeout 60 cargo deny --locked fetch db >/dev/null 2>&1; then
  cargo deny --locked check advisories
else
  echo "advisories: the database could not be fetched, not checked"
fi
