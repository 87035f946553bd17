// Package turnstile is for writing Turnstile policies in Go: facts, workers, decisions, options and log lines as types.
//
// It speaks the Proxy-Wasm ABI itself and needs nothing but the standard library, so a policy builds without a network:
//
//	GOOS=wasip1 GOARCH=wasm go build -buildmode=c-shared -o policy.wasm .
//
// A policy registers a function that makes it from its options, and is asked about each turn:
//
//	func init() { turnstile.Register(configure) }
//
//	func main() {}
//
// Nothing that the host sends makes it panic: a fact that is missing or cannot be read is said to be missing. Outside of
// WebAssembly the package works on a [FakeHost], for tests.
//
// SPDX-License-Identifier: Apache-2.0
package turnstile
