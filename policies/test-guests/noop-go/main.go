// Command noop is a filter that does nothing, with every callback of a stream that a filter can have: what a host's calls into
// a module of Go cost.
package main

import "unsafe"

const (
	goOn = 0
	yes  = 1
)

// Memory that the host asked for: nothing else in Go points to it. There is never more than one piece, for nothing here asks
// for any.
var lent []byte

//go:wasmexport proxy_on_memory_allocate
func allocate(size uint32) unsafe.Pointer {
	lent = make([]byte, max(size, 1))
	return unsafe.Pointer(unsafe.SliceData(lent))
}

//go:wasmexport proxy_abi_version_0_2_1
func abiVersion() {}

//go:wasmexport proxy_on_context_create
func onContextCreate(_, _ uint32) {}

//go:wasmexport proxy_on_vm_start
func onVMStart(_, _ uint32) uint32 { return yes }

//go:wasmexport proxy_on_configure
func onConfigure(_, _ uint32) uint32 { return yes }

//go:wasmexport proxy_on_request_headers
func onRequestHeaders(_, _, _ uint32) uint32 { return goOn }

//go:wasmexport proxy_on_request_body
func onRequestBody(_, _, _ uint32) uint32 { return goOn }

//go:wasmexport proxy_on_request_trailers
func onRequestTrailers(_, _ uint32) uint32 { return goOn }

//go:wasmexport proxy_on_response_headers
func onResponseHeaders(_, _, _ uint32) uint32 { return goOn }

//go:wasmexport proxy_on_response_body
func onResponseBody(_, _, _ uint32) uint32 { return goOn }

//go:wasmexport proxy_on_response_trailers
func onResponseTrailers(_, _ uint32) uint32 { return goOn }

//go:wasmexport proxy_on_done
func onDone(_ uint32) uint32 { return yes }

//go:wasmexport proxy_on_log
func onLog(_ uint32) {}

//go:wasmexport proxy_on_delete
func onDelete(_ uint32) {}

func main() {}
