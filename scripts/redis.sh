#!/usr/bin/env bash
# Installs a Redis server for the tests that talk to one, where it is missing.
set -euo pipefail
command -v redis-server >/dev/null && exit 0
if command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; then
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends redis-server >/dev/null
else
  echo "These tests need redis-server. Install it with your package manager and run this again." >&2
  exit 1
fi
