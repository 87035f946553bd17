package turnstile

import (
	"strings"
	"testing"
)

type recorder struct{ configured string }

func (r recorder) Decide(turn *Turn, decision *Decision) {
	workers := turn.Workers()
	decision.Target(workers[len(workers)-1].Index)
	decision.Scores(Score{1, 2.25}, Score{2, 3})
	decision.HeadStartS(-1.5)
	decision.Note("configured", r.configured)
}

func run(t *testing.T, options string) (*FakeHost, bool) {
	t.Helper()
	Register(func(options *Options) (Policy, error) {
		return recorder{options.Text("text", "-")}, nil
	})
	fake := NewFakeHost()
	worker := Worker{Index: 7, State: Draining, Flags: 6, KVUsedTokens: 1 << 40, ITLMs: 1.5}
	fake.SetWorkers(Worker{}, worker)
	if read := parseTable([]byte(fake.Facts["workers.table"])); len(read) != 2 || read[1] != worker {
		t.Fatalf("read %+v", read)
	}
	return fake, fake.Run(options)
}

func TestDecisionsAreWritten(t *testing.T) {
	fake, ok := run(t, `{"text": "a\u00e9\"\n"}`)
	if !ok {
		t.Fatal(fake.Lines)
	}
	for name, wanted := range map[string]string{
		"route.target":   "#7",
		"route.scores":   `{"#1":2.2,"#2":3.0}`,
		"queue.priority": "-1.500",
		"log.configured": "aé\"\n",
	} {
		if found := fake.Decisions[name]; found != wanted {
			t.Errorf("%s: %q, wanted %q", name, found, wanted)
		}
	}
}

func TestOptionsThatAreWrongAreNamed(t *testing.T) {
	for options, wanted := range map[string]string{
		`{"text": 1}`:                       "option `text`: must be a text",
		`{"text": "", "o": {"a": [1, "}"]}}`: "option `o`: unknown",
	} {
		fake, ok := run(t, options)
		if ok || strings.Join(fake.Lines, "\n") != wanted {
			t.Errorf("%s: %v", options, fake.Lines)
		}
	}
}

func TestTablesThatCannotBeReadHaveNoWorkers(t *testing.T) {
	fake := NewFakeHost()
	fake.SetWorkers(Worker{})
	table := []byte(fake.Facts["workers.table"])
	for cut := range table {
		if len(parseTable(table[:cut])) != 0 {
			t.Errorf("cut at %d", cut)
		}
	}
	table[0] = 2
	if len(parseTable(table)) != 0 {
		t.Error("another version")
	}
}

type listener struct{ heard []Event }

func (l *listener) Decide(*Turn, *Decision) {}

func (l *listener) OnEvent(event *Event, turn *Turn) {
	if tenant, _ := turn.Tenant(); tenant == "t" {
		l.heard = append(l.heard, *event)
	}
}

func TestEventsAreTold(t *testing.T) {
	heard := &listener{}
	Register(func(*Options) (Policy, error) { return heard, nil })
	fake := NewFakeHost()
	fake.Facts["request.tenant"] = "t"
	if !fake.Run("{}") {
		t.Fatal(fake.Lines)
	}
	none := Event{PromptTokens: -1, CompletionTokens: -1, CachedTokens: -1}
	with := func(change func(*Event)) Event {
		event := none
		change(&event)
		return event
	}
	wanted := []Event{
		with(func(e *Event) { e.Kind, e.AtMs = FirstToken, 1 }),
		with(func(e *Event) { e.Kind, e.AtMs, e.Number, e.Name = ToolCall, 2, 3, "say \"hi\"" }),
		with(func(e *Event) { e.Kind, e.Reason = Finish, "stop" }),
		with(func(e *Event) { e.Kind, e.PromptTokens, e.CachedTokens = UsageKnown, 9, 0 }),
		with(func(e *Event) { e.Kind, e.Outcome, e.Status, e.LeftOut = End, "client_gone", 499, 1 }),
	}
	for _, json := range []string{
		`{"event":"first_token","at_ms":1}`,
		`{"event":"tool_call","at_ms":2,"number":3,"name":"say \"hi\""}`,
		`{"event":"coffee","at_ms":2}`,
		`{"event":"finish","at_ms":0,"reason":"stop"}`,
		`{"event":"usage","at_ms":0,"prompt_tokens":9,"cached_tokens":0}`,
		`{"event":"end","at_ms":0,"outcome":"client_gone","status":499,"left_out":1}`,
		``,
	} {
		fake.Tell(json)
	}
	if len(heard.heard) != len(wanted) {
		t.Fatalf("heard %+v", heard.heard)
	}
	for i := range wanted {
		if heard.heard[i] != wanted[i] {
			t.Errorf("%d: heard %+v, wanted %+v", i, heard.heard[i], wanted[i])
		}
	}
}
