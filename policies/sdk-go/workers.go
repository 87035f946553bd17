package turnstile

import (
	"encoding/binary"
	"math"
)

// State tells whether a worker takes turns.
type State uint32

// The states of workers. States that are not known here are read as Starting.
const (
	Ready State = iota
	Draining
	Unhealthy
	Starting
)

// Worker is a candidate, as the gateway saw it when the turn was dispatched.
type Worker struct {
	// Index names the worker in decisions; it is the same as long as the gateway runs.
	Index uint32
	State State
	// Capabilities are bits; see CanTag and its neighbours.
	Capabilities uint32
	// InFlight are requests of this gateway.
	InFlight uint32
	// Running and Waiting are requests that the worker reports.
	Running, Waiting uint32
	// MaxRunning is the most that it runs; 0: not known.
	MaxRunning uint32
	// Flags are bits; see IsBound and its neighbours.
	Flags uint32
	// WaitingUncachedTokens are to be prefilled for the requests that wait there.
	WaitingUncachedTokens uint64
	KVUsedTokens          uint64
	// KVCapacityTokens is 0 while it is not known.
	KVCapacityTokens uint64
	// CachedTokens of this turn's prompt are probably cached there.
	CachedTokens      uint64
	PrefillTokensPerS float64
	// TTFTMs and ITLMs are averages: time to first token and between tokens.
	TTFTMs, ITLMs float64
	// PendingPrefillTokens are uncached tokens of our turns there that have not answered yet.
	PendingPrefillTokens uint64
	// ExpectedDecodeTokens are output tokens expected of our turns in flight there.
	ExpectedDecodeTokens uint64
}

// IsCandidate tells whether the worker is ready and not excluded for this turn.
func (w *Worker) IsCandidate() bool { return w.State == Ready && !w.IsExcluded() }

// IsBound tells whether it holds the turn's session.
func (w *Worker) IsBound() bool { return w.Flags&1 != 0 }

// IsAtLimit tells whether it would queue another turn.
func (w *Worker) IsAtLimit() bool { return w.Flags&2 != 0 }

// IsExcluded tells that it is not to be used for this turn.
func (w *Worker) IsExcluded() bool { return w.Flags&4 != 0 }

// CanTag tells whether it keeps sessions by a tag.
func (w *Worker) CanTag() bool { return w.Capabilities&1 != 0 }

// CanStream tells whether it keeps streaming sessions.
func (w *Worker) CanStream() bool { return w.Capabilities&2 != 0 }

// TakesPriority tells whether it schedules by priority.
func (w *Worker) TakesPriority() bool { return w.Capabilities&4 != 0 }

const (
	tableVersion = 1
	headerBytes  = 16
	recordBytes  = 104
)

// parseTable reads a table of workers; a table that cannot be read has none.
func parseTable(table []byte) []Worker {
	if len(table) < headerBytes || binary.LittleEndian.Uint32(table) != tableVersion {
		return nil
	}
	// Records may grow, so the size is the header's.
	size := uint64(binary.LittleEndian.Uint32(table[4:]))
	count := uint64(binary.LittleEndian.Uint32(table[8:]))
	records := table[headerBytes:]
	if size < recordBytes || uint64(len(records)) < size*count {
		return nil
	}
	workers := make([]Worker, count)
	for i := range workers {
		record := records[uint64(i)*size:]
		u32 := func(at int) uint32 { return binary.LittleEndian.Uint32(record[at:]) }
		u64 := func(at int) uint64 { return binary.LittleEndian.Uint64(record[at:]) }
		f64 := func(at int) float64 { return math.Float64frombits(u64(at)) }
		workers[i] = Worker{
			Index:                 u32(0),
			State:                 min(State(u32(4)), Starting),
			Capabilities:          u32(8),
			InFlight:              u32(12),
			Running:               u32(16),
			Waiting:               u32(20),
			MaxRunning:            u32(24),
			Flags:                 u32(28),
			WaitingUncachedTokens: u64(32),
			KVUsedTokens:          u64(40),
			KVCapacityTokens:      u64(48),
			CachedTokens:          u64(56),
			PrefillTokensPerS:     f64(64),
			TTFTMs:                f64(72),
			ITLMs:                 f64(80),
			PendingPrefillTokens:  u64(88),
			ExpectedDecodeTokens:  u64(96),
		}
	}
	return workers
}

// append writes the record: the counterpart of reading it, for tests.
func (w *Worker) append(table []byte) []byte {
	for _, number := range []uint32{
		w.Index, uint32(w.State), w.Capabilities, w.InFlight, w.Running, w.Waiting, w.MaxRunning, w.Flags,
	} {
		table = binary.LittleEndian.AppendUint32(table, number)
	}
	for _, number := range []uint64{
		w.WaitingUncachedTokens, w.KVUsedTokens, w.KVCapacityTokens, w.CachedTokens,
		math.Float64bits(w.PrefillTokensPerS), math.Float64bits(w.TTFTMs), math.Float64bits(w.ITLMs),
		w.PendingPrefillTokens, w.ExpectedDecodeTokens,
	} {
		table = binary.LittleEndian.AppendUint64(table, number)
	}
	return table
}
