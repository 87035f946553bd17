package turnstile

import (
	"encoding/binary"
	"math"
	"strconv"
	"strings"
)

// SessionAction is what happens to a turn's session.
type SessionAction string

// The actions on sessions.
const (
	// Bind keeps the session on one worker, in the gateway only.
	Bind SessionAction = "bind"
	// Open holds the session on the engine too, where the worker can.
	Open SessionAction = "open"
	// Close ends the session after this turn.
	Close SessionAction = "close"
	// Release forgets the binding now.
	Release SessionAction = "release"
	// Nothing takes back what an earlier plugin asked for.
	Nothing SessionAction = "none"
)

// SessionMode is how the engine takes part in a session.
type SessionMode string

// The modes of sessions.
const (
	Affinity SessionMode = "affinity"
	Tag      SessionMode = "tag"
	Stream   SessionMode = "stream"
	Auto     SessionMode = "auto"
)

// Score is the cost of a worker in ms, lower is better.
type Score struct {
	Worker uint32
	CostMs float64
}

// Decision collects what a policy decides. A value that is wrong is dropped and counted by the gateway.
type Decision struct {
	writes []write
}

type write struct {
	name, value string
}

// Set decides by a name in the documentation, without "turnstile.".
func (d *Decision) Set(name, value string) {
	d.writes = append(d.writes, write{"turnstile." + name, value})
}

// Target is the worker to send the turn to.
func (d *Decision) Target(worker uint32) { d.Set("route.target", workerName(worker)) }

// Fallbacks are workers to try next, best first, if the target fails before it answered.
func (d *Decision) Fallbacks(workers ...uint32) { d.setWorkers("route.fallbacks", workers) }

// Exclude names workers not to use for this turn. It replaces what earlier plugins excluded.
func (d *Decision) Exclude(workers ...uint32) { d.setWorkers("route.exclude", workers) }

// Scores are for the decision log and for policies that follow. Costs are written to a tenth of a ms.
func (d *Decision) Scores(scores ...Score) {
	var text strings.Builder
	for _, score := range scores {
		// JSON has no word for what is no number.
		if math.IsNaN(score.CostMs) || math.IsInf(score.CostMs, 0) {
			continue
		}
		if text.Len() > 0 {
			text.WriteByte(',')
		}
		text.WriteString(`"` + workerName(score.Worker) + `":` + decimal(score.CostMs, 1))
	}
	if text.Len() > 0 {
		d.Set("route.scores", "{"+text.String()+"}")
	}
}

// Reason says why, in a few words, for the decision log.
func (d *Decision) Reason(text string) { d.Set("route.reason", text) }

// Tier is the strict tier in the queue; higher goes first, always.
func (d *Decision) Tier(tier uint32) { d.Set("queue.tier", strconv.FormatUint(uint64(tier), 10)) }

// HeadStartS is in seconds of arrival time; negative lets others pass.
func (d *Decision) HeadStartS(seconds float64) { d.setSeconds("queue.priority", seconds) }

// DeadlineMs makes the turn give up waiting in the queue after so many ms.
func (d *Decision) DeadlineMs(ms uint64) { d.Set("queue.deadline_ms", strconv.FormatUint(ms, 10)) }

// Flow names the flow that shares one fair part of the fleet.
func (d *Decision) Flow(flow string) { d.Set("queue.flow", flow) }

// Session says what happens to the session.
func (d *Decision) Session(action SessionAction) { d.Set("session.action", string(action)) }

// SessionKey is the session's id, instead of the client's.
func (d *Decision) SessionKey(key string) { d.Set("session.key", key) }

// SessionTTLS is the session's idle timeout, seconds from the end of a turn.
func (d *Decision) SessionTTLS(seconds float64) { d.setSeconds("session.ttl_s", seconds) }

// SessionMode says how the engine takes part in the session.
func (d *Decision) SessionMode(mode SessionMode) { d.Set("session.mode", string(mode)) }

// Prefill says whether the next turn is warmed after this one.
func (d *Decision) Prefill(on bool) {
	if on {
		d.Set("prefill", "on")
	} else {
		d.Set("prefill", "off")
	}
}

// EnginePriority is the priority sent to the worker.
func (d *Decision) EnginePriority(priority int64) {
	d.Set("engine.priority", strconv.FormatInt(priority, 10))
}

// NoEnginePriority sends none to the worker, even if the client gave one.
func (d *Decision) NoEnginePriority() { d.Set("engine.priority", "none") }

// Note is for the decision log, under a name of letters, digits, "_", "-" and ".".
func (d *Decision) Note(name, text string) { d.Set("log."+name, text) }

func (d *Decision) setWorkers(name string, workers []uint32) {
	if len(workers) == 0 {
		return
	}
	names := make([]string, len(workers))
	for i, worker := range workers {
		names[i] = workerName(worker)
	}
	d.Set(name, strings.Join(names, ","))
}

func (d *Decision) setSeconds(name string, seconds float64) {
	if !math.IsNaN(seconds) && !math.IsInf(seconds, 0) {
		d.Set(name, decimal(seconds, 3))
	}
}

func workerName(index uint32) string { return "#" + strconv.FormatUint(uint64(index), 10) }

func decimal(number float64, digits int) string { return strconv.FormatFloat(number, 'f', digits, 64) }

// write hands everything to the host in one call, or one by one where the host has no such function.
func (d *Decision) write() {
	if len(d.writes) == 0 {
		return
	}
	var batch []byte
	for _, write := range d.writes {
		for _, text := range []string{write.name, write.value} {
			batch = binary.LittleEndian.AppendUint32(batch, uint32(len(text)))
			batch = append(batch, text...)
		}
	}
	if _, ok := host.Call("turnstile.write", batch); ok {
		return
	}
	for _, write := range d.writes {
		host.Set(write.name, []byte(write.value))
	}
}
