/* warm-balance: the least loaded of the workers that have nearly as much of the prompt cached as the best of them. */
#include "turnstile.h"

enum { MOST_WORKERS = 512, MOST_FALLBACKS = 3 };

/* Share of the prompt that a worker may have less than the best and still be taken, percent. */
static int64_t tolerance_percent;
/* The same for turns with a priority above 0: a short queue matters more to them than a warm cache. */
static int64_t urgent_tolerance_percent;

static bool configure(ts_options *options) {
    tolerance_percent = ts_option_integer(options, "tolerance_percent", 10, 0, 100);
    urgent_tolerance_percent = ts_option_integer(options, "urgent_tolerance_percent", 50, 0, 100);
    return true;
}

/* A worker that may take the turn. */
typedef struct {
    uint32_t index;
    uint64_t load; /* requests */
    uint64_t hit;  /* tokens */
    bool at_limit;
} candidate;

static candidate candidates[MOST_WORKERS];

static bool better(const candidate *a, const candidate *b) {
    if (a->load != b->load) return a->load < b->load;
    if (a->hit != b->hit) return a->hit > b->hit;
    return a->index < b->index;
}

static void decide(void) {
    ts_workers workers;
    if (!ts_read_workers(&workers)) return;
    int64_t prompt = 0, priority = 0;
    (void)ts_prompt_tokens(&prompt);
    (void)ts_priority(&priority);
    const uint64_t prompt_tokens = (uint64_t)prompt;

    size_t count = 0, below_limit = 0;
    for (uint32_t i = 0; i < workers.count && count < MOST_WORKERS; i++) {
        const ts_worker worker = ts_worker_at(&workers, i);
        if (!ts_is_candidate(&worker)) continue;
        const uint64_t reported = (uint64_t)worker.running + worker.waiting;
        candidates[count++] = (candidate){
            .index = worker.index,
            .load = reported > worker.in_flight ? reported : worker.in_flight,
            .hit = worker.cached_tokens < prompt_tokens ? worker.cached_tokens : prompt_tokens,
            .at_limit = ts_is_at_limit(&worker),
        };
        if (!ts_is_at_limit(&worker)) below_limit++;
    }

    const int64_t percent = priority > 0 ? urgent_tolerance_percent : tolerance_percent;
    const uint64_t tolerance = prompt_tokens * (uint64_t)percent / 100;
    uint64_t best = 0;
    for (size_t i = 0; i < count; i++) {
        const bool full = candidates[i].at_limit && below_limit > 0;
        if (!full && candidates[i].hit > best) best = candidates[i].hit;
    }
    /* The warm ones, in order: insertion, since they are few. */
    size_t warm = 0;
    for (size_t i = 0; i < count; i++) {
        const candidate one = candidates[i];
        if ((one.at_limit && below_limit > 0) || one.hit + tolerance < best) continue;
        size_t place = warm++;
        for (; place > 0 && better(&one, &candidates[place - 1]); place--) candidates[place] = candidates[place - 1];
        candidates[place] = one;
    }
    if (warm == 0) return;

    ts_target(candidates[0].index);
    uint32_t fallbacks[MOST_FALLBACKS];
    size_t fallback_count = 0;
    while (fallback_count < MOST_FALLBACKS && fallback_count + 1 < warm) {
        fallbacks[fallback_count] = candidates[fallback_count + 1].index;
        fallback_count++;
    }
    ts_fallbacks(fallbacks, fallback_count);
    ts_line reason = {0};
    ts_put(&reason, "least loaded of ");
    ts_put_unsigned(&reason, warm);
    ts_put(&reason, " within ");
    ts_put_unsigned(&reason, tolerance);
    ts_put(&reason, " tokens of the best hit ");
    ts_put_unsigned(&reason, best);
    ts_reason(ts_written(&reason));
    ts_note_integer("load", (int64_t)candidates[0].load);
}

TS_POLICY(configure, decide)
