package turnstile

// Level is the severity of a log line.
type Level uint32

// The levels of log lines.
const (
	Trace Level = iota
	Debug
	Info
	Warn
	Error
	Critical
)

// Host is what the gateway offers to a policy.
type Host interface {
	// Get reads a property by its dotted path.
	Get(path string) ([]byte, bool)
	// Set writes a property by its dotted path.
	Set(path string, value []byte)
	// Header reads a request header; of several values the first. The name is in lower case.
	Header(name string) ([]byte, bool)
	// Call calls a function of the gateway.
	Call(function string, arguments []byte) ([]byte, bool)
	// Log writes a log line.
	Log(level Level, line string)
	// DefineCounter defines a counter, or finds it again; 0 counts nothing.
	DefineCounter(name string) uint32
	// Count adds to a counter.
	Count(counter uint32, by int64)
}

// The host of this process: the gateway in WebAssembly, a [FakeHost] elsewhere.
var host Host = NewFakeHost()

// Log writes a log line.
func Log(level Level, line string) { host.Log(level, line) }

// Counter is a counter of the policy.
type Counter uint32

// NewCounter defines a counter, or finds it again. Use snake_case; the gateway adds the plugin's name.
func NewCounter(name string) Counter { return Counter(host.DefineCounter(name)) }

// Add counts.
func (c Counter) Add(by int64) {
	if c != 0 {
		host.Count(uint32(c), by)
	}
}
