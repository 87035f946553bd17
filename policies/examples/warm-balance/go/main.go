// Command warm-balance is a Turnstile policy: the least loaded of the workers that have nearly as much of the prompt cached
// as the best of them.
package main

import (
	"cmp"
	"slices"
	"strconv"

	"example.com/warm-balance/turnstile"
)

const mostFallbacks = 3

// policy is made from the plugin's config table.
type policy struct {
	// Share of the prompt that a worker may have less than the best and still be taken, percent.
	tolerancePercent uint64
	// The same for turns with a priority above 0: a short queue matters more to them than a warm cache.
	urgentTolerancePercent uint64
}

func configure(options *turnstile.Options) (turnstile.Policy, error) {
	return policy{
		tolerancePercent:       uint64(options.Integer("tolerance_percent", 10, 0, 100)),
		urgentTolerancePercent: uint64(options.Integer("urgent_tolerance_percent", 50, 0, 100)),
	}, nil
}

// candidate is a worker that may take the turn.
type candidate struct {
	index     uint32
	load, hit uint64
	atLimit   bool
}

func (p policy) Decide(turn *turnstile.Turn, decision *turnstile.Decision) {
	prompt, _ := turn.PromptTokens()
	promptTokens := uint64(prompt)
	percent := p.tolerancePercent
	if priority, _ := turn.Priority(); priority > 0 {
		percent = p.urgentTolerancePercent
	}
	tolerance := promptTokens * percent / 100

	var candidates []candidate
	for _, worker := range turn.Workers() {
		if worker.IsCandidate() {
			candidates = append(candidates, candidate{
				index:   worker.Index,
				load:    max(uint64(worker.Running)+uint64(worker.Waiting), uint64(worker.InFlight)),
				hit:     min(worker.CachedTokens, promptTokens),
				atLimit: worker.IsAtLimit(),
			})
		}
	}
	best, warm := choose(candidates, tolerance)
	if len(warm) == 0 {
		return
	}
	decision.Target(warm[0].index)
	var fallbacks []uint32
	for _, worker := range warm[1:min(len(warm), 1+mostFallbacks)] {
		fallbacks = append(fallbacks, worker.index)
	}
	decision.Fallbacks(fallbacks...)
	// Not by package fmt: it makes the module a megabyte larger.
	decision.Reason("least loaded of " + text(uint64(len(warm))) + " within " + text(tolerance) +
		" tokens of the best hit " + text(best))
	decision.Note("load", text(warm[0].load))
}

// choose returns the best hit, and the workers within tolerance of it, the least loaded first. Full workers count only where
// all are full.
func choose(candidates []candidate, tolerance uint64) (best uint64, warm []candidate) {
	full := func(worker candidate) bool { return worker.atLimit }
	if slices.ContainsFunc(candidates, func(worker candidate) bool { return !full(worker) }) {
		candidates = slices.DeleteFunc(candidates, full)
	}
	for _, worker := range candidates {
		best = max(best, worker.hit)
	}
	warm = slices.DeleteFunc(candidates, func(worker candidate) bool { return worker.hit+tolerance < best })
	slices.SortFunc(warm, func(a, b candidate) int {
		return cmp.Or(cmp.Compare(a.load, b.load), cmp.Compare(b.hit, a.hit), cmp.Compare(a.index, b.index))
	})
	return best, warm
}

func text(number uint64) string { return strconv.FormatUint(number, 10) }

func init() { turnstile.Register(configure) }

func main() {}
