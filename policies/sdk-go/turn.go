package turnstile

import "strconv"

// Turn is the turn being decided. Each method is one read of the host.
type Turn struct{}

// Fact reads a fact by its name in the documentation, without "turnstile.".
func (*Turn) Fact(name string) (string, bool) {
	value, ok := host.Get("turnstile." + name)
	return string(value), ok
}

// Integer reads a fact that is an integer.
func (t *Turn) Integer(name string) (int64, bool) {
	text, ok := t.Fact(name)
	if !ok {
		return 0, false
	}
	number, err := strconv.ParseInt(text, 10, 64)
	return number, err == nil
}

// Number reads a fact that is a number with a fraction.
func (t *Turn) Number(name string) (float64, bool) {
	text, ok := t.Fact(name)
	if !ok {
		return 0, false
	}
	number, err := strconv.ParseFloat(text, 64)
	return number, err == nil
}

// Flag reads a fact that is true or false.
func (t *Turn) Flag(name string) (value bool, ok bool) {
	text, ok := t.Fact(name)
	return text == "true", ok && (text == "true" || text == "false")
}

// Header reads a request header, of several values the first. Write the name in lower case.
func (*Turn) Header(name string) (string, bool) {
	value, ok := host.Header(name)
	return string(value), ok
}

// Call calls a function of the gateway.
func (*Turn) Call(function string, arguments []byte) ([]byte, bool) { return host.Call(function, arguments) }

// Model is the model asked for.
func (t *Turn) Model() (string, bool) { return t.Fact("request.model") }

// Route is the kind of route: chat, completions, generate, responses, messages and so on.
func (t *Turn) Route() (string, bool) { return t.Fact("request.route") }

// SessionID is the session's id, as the client wrote it.
func (t *Turn) SessionID() (string, bool) { return t.Fact("request.session") }

// Tree is the root session of the agent's tree.
func (t *Turn) Tree() (string, bool) { return t.Fact("request.tree") }

// Parent is the session of the parent agent.
func (t *Turn) Parent() (string, bool) { return t.Fact("request.parent") }

// Tenant is made from the caller's credential: 16 hexadecimal digits.
func (t *Turn) Tenant() (string, bool) { return t.Fact("request.tenant") }

// Agent is the agent client, when it was recognised.
func (t *Turn) Agent() (string, bool) { return t.Fact("request.agent") }

// Action is what the client asked for its session: bind, open or close.
func (t *Turn) Action() (string, bool) { return t.Fact("request.action") }

// Priority is the client's priority, signed; larger is more urgent.
func (t *Turn) Priority() (int64, bool) { return t.Integer("request.priority") }

// StrictPriority is the client's strict tier; higher goes first.
func (t *Turn) StrictPriority() (int64, bool) { return t.Integer("request.strict_priority") }

// LatencySensitivity is in seconds of head start.
func (t *Turn) LatencySensitivity() (float64, bool) { return t.Number("request.latency_sensitivity") }

// OSL is the output length that the client expects, tokens.
func (t *Turn) OSL() (int64, bool) { return t.Integer("request.osl") }

// MaxTokens is the most tokens that the answer may have.
func (t *Turn) MaxTokens() (int64, bool) { return t.Integer("request.max_tokens") }

// PromptTokens is the estimated length of the prompt.
func (t *Turn) PromptTokens() (int64, bool) { return t.Integer("request.prompt_tokens") }

// NumberInSession is the number of this turn in its session, from 1.
func (t *Turn) NumberInSession() (int64, bool) { return t.Integer("request.turn") }

// Stream tells whether the answer streams.
func (t *Turn) Stream() (value bool, ok bool) { return t.Flag("request.stream") }

// SpeculativePrefill tells whether the client asked for its next turn to be warmed.
func (t *Turn) SpeculativePrefill() (value bool, ok bool) { return t.Flag("request.speculative_prefill") }

// Attempt is 0 at first, then the number of the retry.
func (t *Turn) Attempt() int64 {
	attempt, _ := t.Integer("attempt")
	return attempt
}

// LastError tells why the attempt before failed.
func (t *Turn) LastError() (string, bool) { return t.Fact("last_error") }

// Workers are the candidates, in order of their index; none outside of the phase route.
func (*Turn) Workers() []Worker {
	table, _ := host.Get("turnstile.workers.table")
	return parseTable(table)
}

// BoundWorker is the worker that holds the turn's session.
func (*Turn) BoundWorker() (Worker, bool) {
	table, _ := host.Get("turnstile.workers.bound")
	workers := parseTable(table)
	if len(workers) == 0 {
		return Worker{}, false
	}
	return workers[0], true
}
