// warm-balance: the least loaded of the workers that have nearly as much of the prompt cached as the best of them.

import { Decision, Options, Policy, register, Turn } from "../turnstile";

// The functions that the gateway calls.
export * from "../turnstile/exports";

const MOST_FALLBACKS = 3;

/** A worker that may take the turn. */
class Candidate {
  constructor(
    public index: u32,
    public load: u64,
    public hit: u64,
    public atLimit: bool,
  ) {}
}

class WarmBalance extends Policy {
  constructor(
    /** Share of the prompt that a worker may have less than the best and still be taken, percent. */
    private tolerancePercent: u64,
    /** The same for turns with a priority above 0: a short queue matters more to them than a warm cache. */
    private urgentTolerancePercent: u64,
  ) {
    super();
  }

  decide(turn: Turn, decision: Decision): void {
    const promptTokens = turn.promptTokens;
    const percent = turn.priority > 0 ? this.urgentTolerancePercent : this.tolerancePercent;
    const tolerance = promptTokens * percent / 100;

    const workers = turn.workers;
    let candidates: Candidate[] = [];
    for (let i = 0; i < workers.length; i++) {
      const worker = workers[i];
      if (!worker.isCandidate) continue;
      const load = max<u64>(<u64>worker.running + <u64>worker.waiting, worker.inFlight);
      const hit = min<u64>(worker.cachedTokens, promptTokens);
      candidates.push(new Candidate(worker.index, load, hit, worker.isAtLimit));
    }
    // Full workers count only where all are full.
    if (candidates.some((worker) => !worker.atLimit)) candidates = candidates.filter((worker) => !worker.atLimit);
    let best: u64 = 0;
    for (let i = 0; i < candidates.length; i++) best = max<u64>(best, candidates[i].hit);
    const warm: Candidate[] = [];
    for (let i = 0; i < candidates.length; i++) {
      if (candidates[i].hit + tolerance >= best) warm.push(candidates[i]);
    }
    if (warm.length == 0) return;
    warm.sort(byLoad);

    decision.target(warm[0].index);
    const fallbacks: u32[] = [];
    for (let i = 1; i < min(warm.length, 1 + MOST_FALLBACKS); i++) fallbacks.push(warm[i].index);
    decision.fallbacks(fallbacks);
    decision.reason("least loaded of " + warm.length.toString() + " within " + tolerance.toString() +
      " tokens of the best hit " + best.toString());
    decision.note("load", warm[0].load.toString());
  }
}

/** Less load first, then the better hit, then the lower index. */
function byLoad(a: Candidate, b: Candidate): i32 {
  if (a.load != b.load) return a.load < b.load ? -1 : 1;
  if (a.hit != b.hit) return a.hit > b.hit ? -1 : 1;
  return a.index < b.index ? -1 : 1;
}

register((options: Options): Policy => new WarmBalance(
  <u64>options.integer("tolerance_percent", 10, 0, 100),
  <u64>options.integer("urgent_tolerance_percent", 50, 0, 100),
));
