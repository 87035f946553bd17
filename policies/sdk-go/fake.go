package turnstile

import (
	"encoding/binary"
	"strings"
)

// FakeHost holds facts and collects decisions, for tests of policies. Names are without "turnstile.".
type FakeHost struct {
	Facts     map[string]string
	Headers   map[string]string
	Decisions map[string]string
	Lines     []string
	counters  []string
	Counted   map[string]int64
}

// NewFakeHost is a host that knows nothing.
func NewFakeHost() *FakeHost {
	return &FakeHost{
		Facts:     map[string]string{},
		Headers:   map[string]string{},
		Decisions: map[string]string{},
		Counted:   map[string]int64{},
	}
}

// SetWorkers sets the candidates.
func (f *FakeHost) SetWorkers(workers ...Worker) {
	table := binary.LittleEndian.AppendUint32(nil, tableVersion)
	for _, number := range []uint32{recordBytes, uint32(len(workers)), 0} {
		table = binary.LittleEndian.AppendUint32(table, number)
	}
	for i := range workers {
		table = workers[i].append(table)
	}
	f.Facts["workers.table"] = string(table)
}

// Run configures the registered policy with JSON options and lets it decide. False if it refuses the options.
func (f *FakeHost) Run(options string) bool {
	before := host
	host = f
	defer func() { host = before }()
	if !onConfigure([]byte(options)) {
		return false
	}
	onDecide()
	return true
}

// Tell tells the policy that was run of an event, as JSON. Nothing happens if it is no [Listener], or the event is not known.
func (f *FakeHost) Tell(event string) {
	before := host
	host = f
	defer func() { host = before }()
	onEvent(eventFunction, []byte(event))
}

// Get reads a fact.
func (f *FakeHost) Get(path string) ([]byte, bool) {
	value, ok := f.Facts[strings.TrimPrefix(path, "turnstile.")]
	return []byte(value), ok
}

// Set takes a decision.
func (f *FakeHost) Set(path string, value []byte) {
	f.Decisions[strings.TrimPrefix(path, "turnstile.")] = string(value)
}

// Header reads a header.
func (f *FakeHost) Header(name string) ([]byte, bool) {
	value, ok := f.Headers[name]
	return []byte(value), ok
}

// Call knows no function, so decisions are written one by one.
func (f *FakeHost) Call(string, []byte) ([]byte, bool) { return nil, false }

// Log keeps a line.
func (f *FakeHost) Log(_ Level, line string) { f.Lines = append(f.Lines, line) }

// DefineCounter defines a counter.
func (f *FakeHost) DefineCounter(name string) uint32 {
	f.counters = append(f.counters, name)
	return uint32(len(f.counters))
}

// Count adds to a counter.
func (f *FakeHost) Count(counter uint32, by int64) {
	if counter > 0 && int(counter) <= len(f.counters) {
		f.Counted[f.counters[counter-1]] += by
	}
}
