package main

import (
	"testing"

	"example.com/warm-balance/turnstile"
)

func TestTheLeastLoadedOfTheWarmWorkersIsTaken(t *testing.T) {
	for _, test := range []struct {
		options, priority, target string
	}{
		{"", "0", "#1"},
		{`{"tolerance_percent": 0}`, "0", "#0"},
		{"", "1", "#2"},
		{"", "-1", "#1"},
	} {
		host := turnstile.NewFakeHost()
		host.Facts["request.prompt_tokens"] = "1000"
		host.Facts["request.priority"] = test.priority
		host.SetWorkers(
			turnstile.Worker{Index: 0, Running: 4, CachedTokens: 900},
			turnstile.Worker{Index: 1, Running: 2, CachedTokens: 850},
			turnstile.Worker{Index: 2, CachedTokens: 500},
		)
		if !host.Run(test.options) || host.Decisions["route.target"] != test.target {
			t.Errorf("%+v: %v %v", test, host.Decisions, host.Lines)
		}
	}
}

func TestAShareIsAtMostAll(t *testing.T) {
	host := turnstile.NewFakeHost()
	if host.Run(`{"tolerance_percent": 101}`) || host.Lines[0] != "option `tolerance_percent`: must be 0 to 100" {
		t.Error(host.Lines)
	}
}
