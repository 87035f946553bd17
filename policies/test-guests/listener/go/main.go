// Command listener logs every event that it is told of. The same in every language of the SDKs.
package main

import (
	"strconv"

	"example.com/warm-balance/turnstile"
)

type listener struct{}

func (listener) Decide(*turnstile.Turn, *turnstile.Decision) {}

func (listener) OnEvent(event *turnstile.Event, turn *turnstile.Turn) {
	what := "unknown"
	switch event.Kind {
	case turnstile.FirstToken:
		what = "first_token"
	case turnstile.ToolCall:
		what = "tool_call " + unsigned(event.Number) + " " + event.Name
	case turnstile.Finish:
		what = "finish " + event.Reason
	case turnstile.UsageKnown:
		what = "usage " + signed(event.PromptTokens) + " " + signed(event.CompletionTokens) + " " + signed(event.CachedTokens)
	case turnstile.End:
		what = "end " + event.Outcome + " " + unsigned(event.Status) + " " + unsigned(event.LeftOut)
	}
	model, _ := turn.Model()
	turnstile.Log(turnstile.Info, model+" "+what)
}

func signed(number int64) string { return strconv.FormatInt(number, 10) }

func unsigned(number uint64) string { return strconv.FormatUint(number, 10) }

func init() {
	turnstile.Register(func(*turnstile.Options) (turnstile.Policy, error) { return listener{}, nil })
}

func main() {}
