# Everything a newcomer or CI runs. Each target does its own set-up.

SHELL := /bin/bash
CARGO ?= cargo
TARGET_DIR := $(or $(CARGO_TARGET_DIR),target)
TURNSTILE := $(TARGET_DIR)/debug/turnstile
# The gateway and the programs of tests/. After `make test`, with the features that the tests were built with
# (PROGRAMS="cargo build --locked --workspace --bins --tests"), hardly anything is left to build.
PROGRAMS ?= $(CARGO) build --locked -p turnstile -p turnstile-tests --bins

.PHONY: help demo build test lint deny policies conformance policy-journey bench soak swaps session-sim test-sglang docs setup fuzz bench-plugins compare-envoy third-party

help: ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

setup: ## install what the build needs (cmake and a C compiler), once
	@scripts/setup.sh

build: setup ## build the gateway (debug)
	$(CARGO) build --locked -p turnstile

demo: setup ## simulated workers, the gateway, and an agent conversation through it, explained
	$(PROGRAMS)
	$(TARGET_DIR)/debug/turnstile-demo

policy-journey: setup ## a policy in every language (JOURNEY="go c") from an empty folder to production and back, under streams
	$(PROGRAMS)
	$(TARGET_DIR)/debug/turnstile-journey $(JOURNEY)

test: setup ## all tests
	scripts/test.sh $(NEXTEST_FLAGS)

lint: setup ## rustfmt and clippy, warnings are errors
	$(CARGO) fmt --all --check
	$(CARGO) fmt --all --check --manifest-path policies/Cargo.toml
	$(CARGO) clippy --locked --workspace --all-targets -- -D warnings
	$(CARGO) clippy --locked --manifest-path policies/Cargo.toml --target-dir $(TARGET_DIR)/policies --all-targets -- -D warnings

deny: ## licences and advisories of all dependencies
	@scripts/deny.sh

policies: ## rebuild policies/dist/*.wasm
	policies/build.sh

conformance: setup ## the Proxy-Wasm conformance kit against the host library and the gateway (CONFORMANCE_FLAGS="--only 28 --mode host")
	$(CARGO) build --locked -p turnstile-tests --bin turnstile-conformance
	$(TARGET_DIR)/debug/turnstile-conformance $(CONFORMANCE_FLAGS)

fuzz: ## fuzz every target for FUZZ_SECONDS (60) each; FUZZ="body_scan config" picks some; needs a nightly toolchain
	scripts/fuzz.sh $(FUZZ)

bench: setup ## CPU per request beside a plain pingora proxy (release build)
	$(CARGO) build --release --locked -p turnstile -p turnstile-tests --bin turnstile --bin turnstile-bench
	$(TARGET_DIR)/release/turnstile-bench $(BENCH_FLAGS)

soak: setup ## 20 minutes (SOAK_MINUTES) of agents on failing workers; memory, files, tasks and sessions end where they began
	$(PROGRAMS)
	$(TARGET_DIR)/debug/turnstile-soak

swaps: setup ## SWAPS (10000) swaps of a policy under streaming load, one bad module in ten: nothing fails, nothing grows
	SWAPS=$(or $(SWAPS),10000) $(CARGO) nextest run --locked -p turnstile-tests --no-capture --retries 0 -E 'test(swaps_under_load)'

session-sim: setup ## random schedules of sessions against faults in virtual time (SEEDS=5000 FIRST=0; a failing one is printed for replay)
	$(CARGO) build --locked -p turnstile-tests --bin turnstile-session-sim
	$(TARGET_DIR)/debug/turnstile-session-sim --first $(or $(FIRST),0) --seeds $(or $(SEEDS),5000)

bench-plugins: setup ## CPU of plugins: none, the policies, filters; ENVOY=FILE measures an Envoy with the same filters beside them
	$(CARGO) build --release --locked -p turnstile -p turnstile-tests --bin turnstile --bin turnstile-bench
	$(TARGET_DIR)/release/turnstile-bench --plugins $(if $(ENVOY),--envoy $(ENVOY)) $(BENCH_FLAGS)

compare-envoy: build ## one filter, asked the same here and on Envoy, every difference explained (downloads 37 MB once)
	tests/envoy/run.sh --markdown docs/envoy.md

third-party: setup ## other people's plugins as they are, by checksum, asked what they are for (downloads 27 MB once; needs pip, redis-server)
	$(PROGRAMS)
	tests/third-party/run.sh

test-sglang: build ## the same conversation against a real SGLang on CPU (downloads about 6 GB once)
	tests/sglang/run.sh

docs: ## rewrite the generated pages in docs/
	UPDATE_DOCS=1 $(CARGO) nextest run --locked -p turnstile-config -p turnstile -E 'test(fresh)'
