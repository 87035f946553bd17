package turnstile

import "unsafe"

// The host functions that are used. All answer with a status, 0 for OK.

//go:wasmimport env proxy_log
func proxyLog(level uint32, line unsafe.Pointer, len uint32) int32

//go:wasmimport env proxy_get_property
func proxyGetProperty(path unsafe.Pointer, len uint32, value, valueLen unsafe.Pointer) int32

//go:wasmimport env proxy_set_property
func proxySetProperty(path unsafe.Pointer, len uint32, value unsafe.Pointer, valueLen uint32) int32

//go:wasmimport env proxy_get_header_map_value
func proxyGetHeader(kind uint32, name unsafe.Pointer, len uint32, value, valueLen unsafe.Pointer) int32

//go:wasmimport env proxy_get_buffer_bytes
func proxyGetBuffer(kind, start, max uint32, value, valueLen unsafe.Pointer) int32

//go:wasmimport env proxy_call_foreign_function
func proxyCallForeign(name unsafe.Pointer, len uint32, arguments unsafe.Pointer, argumentsLen uint32, result, resultLen unsafe.Pointer) int32

//go:wasmimport env proxy_define_metric
func proxyDefineMetric(kind uint32, name unsafe.Pointer, len uint32, id unsafe.Pointer) int32

//go:wasmimport env proxy_increment_metric
func proxyIncrementMetric(id uint32, by int64) int32

const (
	requestHeaders      = 0
	pluginConfiguration = 7
	callData            = 8
	counterMetric       = 0
)

type proxyWasm struct{}

func init() { host = proxyWasm{} }

// Memory that the host asked for and has not handed over yet: kept here, for nothing else in Go points to it.
var lent = map[uint32][]byte{}

//go:wasmexport proxy_on_memory_allocate
func allocate(size uint32) unsafe.Pointer {
	memory := make([]byte, max(size, 1))
	at := unsafe.Pointer(unsafe.SliceData(memory))
	lent[uint32(uintptr(at))] = memory
	return at
}

// take is what the host wrote at an address that it gave.
func take(at, size uint32) []byte {
	memory := lent[at]
	delete(lent, at)
	return memory[:min(int(size), len(memory))]
}

func pointer(bytes []byte) (unsafe.Pointer, uint32) {
	return unsafe.Pointer(unsafe.SliceData(bytes)), uint32(len(bytes))
}

func pointerOf(text string) (unsafe.Pointer, uint32) {
	return unsafe.Pointer(unsafe.StringData(text)), uint32(len(text))
}

func (proxyWasm) Get(path string) ([]byte, bool) {
	at, n := pointerOf(path)
	var value, size uint32
	if proxyGetProperty(at, n, unsafe.Pointer(&value), unsafe.Pointer(&size)) != 0 {
		return nil, false
	}
	return take(value, size), true
}

func (proxyWasm) Set(path string, value []byte) {
	at, n := pointerOf(path)
	valueAt, size := pointer(value)
	proxySetProperty(at, n, valueAt, size)
}

func (proxyWasm) Header(name string) ([]byte, bool) {
	at, n := pointerOf(name)
	var value, size uint32
	if proxyGetHeader(requestHeaders, at, n, unsafe.Pointer(&value), unsafe.Pointer(&size)) != 0 {
		return nil, false
	}
	return take(value, size), true
}

func (proxyWasm) Call(function string, arguments []byte) ([]byte, bool) {
	at, n := pointerOf(function)
	argumentsAt, argumentsLen := pointer(arguments)
	var result, size uint32
	if proxyCallForeign(at, n, argumentsAt, argumentsLen, unsafe.Pointer(&result), unsafe.Pointer(&size)) != 0 {
		return nil, false
	}
	return take(result, size), true
}

func (proxyWasm) Log(level Level, line string) {
	at, n := pointerOf(line)
	proxyLog(uint32(level), at, n)
}

func (proxyWasm) DefineCounter(name string) uint32 {
	at, n := pointerOf(name)
	var id uint32
	if proxyDefineMetric(counterMetric, at, n, unsafe.Pointer(&id)) != 0 {
		return 0
	}
	return id
}

func (proxyWasm) Count(counter uint32, by int64) { proxyIncrementMetric(counter, by) }

//go:wasmexport proxy_abi_version_0_2_1
func abiVersion() {}

//go:wasmexport proxy_on_context_create
func onContextCreate(_, _ uint32) {}

//go:wasmexport proxy_on_vm_start
func onVMStart(_, _ uint32) uint32 { return 1 }

func buffer(kind, size uint32) []byte {
	var at, n uint32
	if size == 0 || proxyGetBuffer(kind, 0, size, unsafe.Pointer(&at), unsafe.Pointer(&n)) != 0 {
		return nil
	}
	return take(at, n)
}

//go:wasmexport proxy_on_configure
func onConfigureCall(_, size uint32) uint32 {
	if onConfigure(buffer(pluginConfiguration, size)) {
		return 1
	}
	return 0
}

//go:wasmexport proxy_on_request_headers
func onRequestHeaders(_, _, _ uint32) uint32 {
	onDecide()
	return 0
}

//go:wasmexport proxy_on_foreign_function
func onForeignFunction(_, function, size uint32) { onEvent(function, buffer(callData, size)) }

//go:wasmexport proxy_on_log
func onLog(_ uint32) { onFinished() }
