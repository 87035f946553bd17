package turnstile

import "strconv"

// eventFunction is the id of the host's function call that brings events.
const eventFunction = 1

// EventKind says what an event is about.
type EventKind uint8

// The kinds of events.
const (
	// FirstToken: a stream has brought its first token. Comes before everything else.
	FirstToken EventKind = iota + 1
	// ToolCall: a tool is called; Number and Name say which.
	ToolCall
	// Finish: generation has ended; Reason says why.
	Finish
	// UsageKnown: the answer has ended; its tokens, as far as the worker told them.
	UsageKnown
	// End: the turn has ended; Outcome and Status say how. Comes last.
	End
)

// Event is something that happened in the answer to a turn.
type Event struct {
	Kind EventKind
	// AtMs is when, from the arrival of the request.
	AtMs uint64
	// Number is the place of a tool call among those of the answer, from 0.
	Number uint64
	// Name is the name of the tool that is called.
	Name string
	// Reason is why generation ended, such as stop, length or tool_calls.
	Reason string
	// The tokens of an answer; -1 for what the worker did not tell.
	PromptTokens, CompletionTokens, CachedTokens int64
	// Outcome is how the turn ended, as in the access log: finished, client_gone, cut, timeout, refused and others.
	Outcome string
	// Status is the HTTP status that the client got.
	Status uint64
	// LeftOut counts events that were not told because there were too many of their kind.
	LeftOut uint64
}

var kinds = map[string]EventKind{
	"first_token": FirstToken, "tool_call": ToolCall, "finish": Finish, "usage": UsageKnown, "end": End,
}

// parseEvent reads an event. False for one that is not known here.
func parseEvent(json []byte) (event Event, ok bool) {
	event = Event{PromptTokens: -1, CompletionTokens: -1, CachedTokens: -1}
	for _, member := range parseOptions(json).members {
		text, _ := unquote(member.json)
		number, _ := strconv.ParseInt(member.json, 10, 64)
		switch member.name {
		case "event":
			event.Kind = kinds[text]
		case "at_ms":
			event.AtMs = uint64(number)
		case "number":
			event.Number = uint64(number)
		case "name":
			event.Name = text
		case "reason":
			event.Reason = text
		case "prompt_tokens":
			event.PromptTokens = number
		case "completion_tokens":
			event.CompletionTokens = number
		case "cached_tokens":
			event.CachedTokens = number
		case "outcome":
			event.Outcome = text
		case "status":
			event.Status = uint64(number)
		case "left_out":
			event.LeftOut = uint64(number)
		}
	}
	return event, event.Kind != 0
}
