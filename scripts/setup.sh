#!/usr/bin/env bash
# Installs what a build needs and this machine lacks: cmake and a C compiler (pingora's zlib-ng and TLS crates compile C).
set -euo pipefail
missing=()
command -v cmake >/dev/null || missing+=(cmake)
command -v cc >/dev/null || missing+=(gcc libc6-dev)
command -v make >/dev/null || missing+=(make)
if [ ${#missing[@]} -gt 0 ]; then
  if command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; then
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
  else
    echo "Turnstile's build needs: ${missing[*]}. Install them with your package manager and run this again." >&2
    exit 1
  fi
fi
command -v cargo >/dev/null || { echo "Turnstile's build needs Rust 1.95 or newer (https://rustup.rs)." >&2; exit 1; }
