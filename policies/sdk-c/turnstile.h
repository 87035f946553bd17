/* Turnstile policies in C: facts, workers, decisions, options, log lines.
 *
 * One header and nothing else: no library, no allocator, no operating system. Include it in one file of the policy and
 * build with
 *
 *     clang --target=wasm32 -O2 -nostdlib -Wl,--no-entry -o policy.wasm policy.c
 *
 * A policy is two functions and a macro:
 *
 *     static bool configure(ts_options *options) { ...; return true; }
 *     static void decide(void) { ... }
 *     TS_POLICY(configure, decide)
 *
 * Texts and worker lists that are read are valid until the function that read them returns to the gateway. What must live
 * longer is copied into variables of the policy.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef TURNSTILE_H
#define TURNSTILE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* === texts ======================================================================================================== */

/* Bytes in memory, without a NUL at the end. */
typedef struct {
    const char *at;
    size_t len;
} ts_text;

/* The text of a string literal. */
#define TS_TEXT(literal) ((ts_text){(literal), sizeof(literal) - 1})

/* === the host's functions ========================================================================================= */

#define TS_IMPORT(name) __attribute__((import_module("env"), import_name(name)))
#define TS_EXPORT(name) __attribute__((export_name(name)))
#define TS_UNUSED __attribute__((unused))

TS_IMPORT("proxy_log") extern int32_t ts_host_log(int32_t level, const char *at, size_t len);
TS_IMPORT("proxy_get_property")
extern int32_t ts_host_get_property(const char *path, size_t len, const char **value, size_t *value_len);
TS_IMPORT("proxy_set_property")
extern int32_t ts_host_set_property(const char *path, size_t len, const char *value, size_t value_len);
TS_IMPORT("proxy_get_header_map_value")
extern int32_t ts_host_get_header(int32_t map, const char *name, size_t len, const char **value, size_t *value_len);
TS_IMPORT("proxy_get_buffer_bytes")
extern int32_t ts_host_get_buffer(int32_t buffer, size_t start, size_t max, const char **value, size_t *value_len);
TS_IMPORT("proxy_call_foreign_function")
extern int32_t ts_host_call(const char *name, size_t len, const char *arguments, size_t arguments_len,
                            const char **result, size_t *result_len);
TS_IMPORT("proxy_define_metric")
extern int32_t ts_host_define_metric(int32_t kind, const char *name, size_t len, uint32_t *id);
TS_IMPORT("proxy_increment_metric") extern int32_t ts_host_increment_metric(uint32_t id, int64_t by);

enum { TS_STATUS_OK = 0, TS_STATUS_NOT_FOUND = 1 };
enum { TS_MAP_REQUEST_HEADERS = 0, TS_BUFFER_PLUGIN_CONFIGURATION = 7, TS_BUFFER_CALL_DATA = 8 };

/* === memory ======================================================================================================= */

/* Memory is given out upward from the end of the program's data and taken back at once, when a callback begins. */

extern unsigned char __heap_base;
static uintptr_t ts_next;

static void ts_forget_all(void) { ts_next = (uintptr_t)&__heap_base; }

/* Memory for `len` bytes, aligned to 8. The instance ends if the gateway allows it no more. */
static void *ts_allocate(size_t len) {
    if (ts_next == 0) ts_forget_all();
    const uintptr_t at = (ts_next + 7) & ~(uintptr_t)7;
    const uintptr_t end = at + len;
    if (end < at) __builtin_trap();
    const uintptr_t have = (uintptr_t)__builtin_wasm_memory_size(0) << 16;
    if (end > have && __builtin_wasm_memory_grow(0, ((end - have) + 0xffff) >> 16) == (size_t)-1) __builtin_trap();
    ts_next = end;
    return (void *)at;
}

/* The compiler makes calls of these out of plain copies and loops; they are not to be made into calls of themselves. */
__attribute__((weak, no_builtin("memcpy"))) void *memcpy(void *to, const void *from, size_t len) {
    char *target = to;
    const char *source = from;
    for (size_t i = 0; i < len; i++) target[i] = source[i];
    return to;
}

__attribute__((weak, no_builtin("memset"))) void *memset(void *at, int byte, size_t len) {
    char *target = at;
    for (size_t i = 0; i < len; i++) target[i] = (char)byte;
    return at;
}

static bool ts_same(ts_text a, ts_text b) {
    if (a.len != b.len) return false;
    for (size_t i = 0; i < a.len; i++) {
        if (a.at[i] != b.at[i]) return false;
    }
    return true;
}

static size_t ts_length(const char *text) {
    size_t len = 0;
    while (text[len] != 0) len++;
    return len;
}

/* The text of a C string. */
TS_UNUSED static ts_text ts_of(const char *text) { return (ts_text){text, ts_length(text)}; }

/* === writing text ================================================================================================= */

/* A text in the making. What does not fit is left out. Begin with {0}. */
typedef struct {
    char at[1024];
    size_t len;
} ts_line;

static void ts_put_text(ts_line *line, ts_text text) {
    for (size_t i = 0; i < text.len && line->len < sizeof line->at; i++) line->at[line->len++] = text.at[i];
}

TS_UNUSED static void ts_put(ts_line *line, const char *text) { ts_put_text(line, ts_of(text)); }

static void ts_put_unsigned(ts_line *line, uint64_t number) {
    char digits[20];
    size_t count = 0;
    do {
        digits[count++] = (char)('0' + number % 10);
        number /= 10;
    } while (number != 0);
    while (count > 0) ts_put_text(line, (ts_text){&digits[--count], 1});
}

static void ts_put_integer(ts_line *line, int64_t number) {
    if (number < 0) ts_put_text(line, TS_TEXT("-"));
    ts_put_unsigned(line, number < 0 ? 0 - (uint64_t)number : (uint64_t)number);
}

static ts_text ts_written(const ts_line *line) { return (ts_text){line->at, line->len}; }

/* === reading text ================================================================================================= */

/* A decimal integer and nothing else; false if it is none, or does not fit. */
static bool ts_read_integer(ts_text text, int64_t *number) {
    const bool negative = text.len > 0 && text.at[0] == '-';
    const uint64_t most = negative ? (uint64_t)1 << 63 : (uint64_t)INT64_MAX;
    uint64_t value = 0;
    size_t i = negative ? 1 : 0;
    if (i == text.len) return false;
    for (; i < text.len; i++) {
        const char c = text.at[i];
        if (c < '0' || c > '9') return false;
        const uint64_t digit = (uint64_t)(c - '0');
        if (value > (most - digit) / 10) return false;
        value = value * 10 + digit;
    }
    *number = negative ? (int64_t)(0 - value) : (int64_t)value;
    return true;
}

/* === log lines and counters ======================================================================================= */

typedef enum { TS_TRACE, TS_DEBUG, TS_INFO, TS_WARN, TS_ERROR, TS_CRITICAL } ts_level;

static void ts_log(ts_level level, ts_text text) { (void)ts_host_log(level, text.at, text.len); }

/* Defines a counter, or finds it again. Use snake_case; the gateway adds the plugin's name. 0 counts nothing. */
TS_UNUSED static uint32_t ts_counter(const char *name) {
    uint32_t id = 0;
    enum { COUNTER = 0 };
    return ts_host_define_metric(COUNTER, name, ts_length(name), &id) == TS_STATUS_OK ? id : 0;
}

TS_UNUSED static void ts_count(uint32_t counter, int64_t by) {
    if (counter != 0) (void)ts_host_increment_metric(counter, by);
}

/* === facts ======================================================================================================== */

#define TS_MAX_NAME 96

/* A fact by its name in the documentation, without `turnstile.`; false if it is not there. */
static bool ts_fact(const char *name, ts_text *value) {
    static const ts_text prefix = {"turnstile.", 10};
    char path[TS_MAX_NAME];
    const size_t len = ts_length(name);
    if (len > sizeof path - prefix.len) return false;
    memcpy(path, prefix.at, prefix.len);
    memcpy(path + prefix.len, name, len);
    ts_text found = {"", 0};
    if (ts_host_get_property(path, prefix.len + len, &found.at, &found.len) != TS_STATUS_OK) return false;
    *value = found;
    return true;
}

static bool ts_fact_integer(const char *name, int64_t *value) {
    ts_text text;
    return ts_fact(name, &text) && ts_read_integer(text, value);
}

static bool ts_fact_flag(const char *name, bool *value) {
    ts_text text;
    if (!ts_fact(name, &text)) return false;
    *value = ts_same(text, TS_TEXT("true"));
    return *value || ts_same(text, TS_TEXT("false"));
}

/* A request header, of several values the first. Write the name in lower case. */
TS_UNUSED static bool ts_header(const char *name, ts_text *value) {
    ts_text found = {"", 0};
    const int32_t status =
        ts_host_get_header(TS_MAP_REQUEST_HEADERS, name, ts_length(name), &found.at, &found.len);
    if (status != TS_STATUS_OK) return false;
    *value = found;
    return true;
}

/* A function of the gateway. The result is empty where there is nothing to say. */
static bool ts_call(const char *name, ts_text arguments, ts_text *result) {
    ts_text found = {"", 0};
    const int32_t status =
        ts_host_call(name, ts_length(name), arguments.at, arguments.len, &found.at, &found.len);
    if (status != TS_STATUS_OK) return false;
    *result = found;
    return true;
}

/* The facts of the request. Each is one read of the host; false if it is not known. */
TS_UNUSED static bool ts_model(ts_text *value) { return ts_fact("request.model", value); }
TS_UNUSED static bool ts_route(ts_text *value) { return ts_fact("request.route", value); }
TS_UNUSED static bool ts_session_id(ts_text *value) { return ts_fact("request.session", value); }
TS_UNUSED static bool ts_tree(ts_text *value) { return ts_fact("request.tree", value); }
TS_UNUSED static bool ts_parent(ts_text *value) { return ts_fact("request.parent", value); }
TS_UNUSED static bool ts_tenant(ts_text *value) { return ts_fact("request.tenant", value); }
TS_UNUSED static bool ts_agent(ts_text *value) { return ts_fact("request.agent", value); }
TS_UNUSED static bool ts_action(ts_text *value) { return ts_fact("request.action", value); }
TS_UNUSED static bool ts_priority(int64_t *value) { return ts_fact_integer("request.priority", value); }
TS_UNUSED static bool ts_strict_priority(int64_t *value) { return ts_fact_integer("request.strict_priority", value); }
TS_UNUSED static bool ts_osl(int64_t *value) { return ts_fact_integer("request.osl", value); }
TS_UNUSED static bool ts_max_tokens(int64_t *value) { return ts_fact_integer("request.max_tokens", value); }
TS_UNUSED static bool ts_prompt_tokens(int64_t *value) { return ts_fact_integer("request.prompt_tokens", value); }
TS_UNUSED static bool ts_number_in_session(int64_t *value) { return ts_fact_integer("request.turn", value); }
TS_UNUSED static bool ts_stream(bool *value) { return ts_fact_flag("request.stream", value); }
TS_UNUSED static bool ts_speculative_prefill(bool *value) {
    return ts_fact_flag("request.speculative_prefill", value);
}
TS_UNUSED static int64_t ts_attempt(void) {
    int64_t attempt = 0;
    return ts_fact_integer("attempt", &attempt) ? attempt : 0;
}

/* === workers ====================================================================================================== */

typedef enum { TS_READY, TS_DRAINING, TS_UNHEALTHY, TS_STARTING } ts_state;

/* One candidate, as the gateway saw it when the turn was dispatched. */
typedef struct {
    uint32_t index;                   /* names it in decisions; the same as long as the gateway runs */
    ts_state state;                   /* states that are not known here are TS_STARTING */
    uint32_t capabilities;            /* see ts_can_tag and its neighbours */
    uint32_t in_flight;               /* requests of this gateway in flight */
    uint32_t running;                 /* requests running there, as it reports */
    uint32_t waiting;                 /* requests waiting there, as it reports */
    uint32_t max_running;             /* most that it runs; 0: not known */
    uint32_t flags;                   /* see ts_is_bound and its neighbours */
    uint64_t waiting_uncached_tokens; /* prompt tokens to be prefilled for the requests waiting there */
    uint64_t kv_used_tokens;          /* KV tokens in use */
    uint64_t kv_capacity_tokens;      /* KV pool, tokens; 0: not known */
    uint64_t cached_tokens;           /* tokens of this turn's prompt that are probably cached there */
    double prefill_tokens_per_s;      /* measured prefill rate */
    double ttft_ms;                   /* average time to first token */
    double itl_ms;                    /* average time between tokens */
    uint64_t pending_prefill_tokens;  /* uncached tokens of our turns there that have not answered yet */
    uint64_t expected_decode_tokens;  /* output tokens expected of our turns in flight there */
} ts_worker;

/* A list of workers, in order of their index. */
typedef struct {
    const char *records;
    uint32_t record_bytes;
    uint32_t count;
} ts_workers;

enum { TS_TABLE_VERSION = 1, TS_TABLE_HEADER_BYTES = 16, TS_TABLE_RECORD_BYTES = 104 };

static uint32_t ts_u32(const char *at) {
    uint32_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

static uint64_t ts_u64(const char *at) {
    uint64_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

static double ts_f64(const char *at) {
    double value;
    memcpy(&value, at, sizeof value);
    return value;
}

static bool ts_read_table(const char *name, ts_workers *workers) {
    ts_text table;
    if (!ts_fact(name, &table) || table.len < TS_TABLE_HEADER_BYTES) return false;
    if (ts_u32(table.at) != TS_TABLE_VERSION) return false;
    /* Records may grow, so the size is the header's. */
    const uint32_t record_bytes = ts_u32(table.at + 4);
    const uint32_t count = ts_u32(table.at + 8);
    const uint64_t needed = TS_TABLE_HEADER_BYTES + (uint64_t)record_bytes * count;
    if (record_bytes < TS_TABLE_RECORD_BYTES || table.len < needed) return false;
    *workers = (ts_workers){table.at + TS_TABLE_HEADER_BYTES, record_bytes, count};
    return true;
}

/* The candidates of the turn; false outside of the phase `route`. */
TS_UNUSED static bool ts_read_workers(ts_workers *workers) { return ts_read_table("workers.table", workers); }

/* The worker at a place of the list, from 0; what is beyond it is not to be read. */
TS_UNUSED static ts_worker ts_worker_at(const ts_workers *workers, uint32_t place) {
    const char *at = workers->records + (size_t)place * workers->record_bytes;
    const uint32_t state = ts_u32(at + 4);
    return (ts_worker){
        .index = ts_u32(at),
        .state = state <= TS_STARTING ? (ts_state)state : TS_STARTING,
        .capabilities = ts_u32(at + 8),
        .in_flight = ts_u32(at + 12),
        .running = ts_u32(at + 16),
        .waiting = ts_u32(at + 20),
        .max_running = ts_u32(at + 24),
        .flags = ts_u32(at + 28),
        .waiting_uncached_tokens = ts_u64(at + 32),
        .kv_used_tokens = ts_u64(at + 40),
        .kv_capacity_tokens = ts_u64(at + 48),
        .cached_tokens = ts_u64(at + 56),
        .prefill_tokens_per_s = ts_f64(at + 64),
        .ttft_ms = ts_f64(at + 72),
        .itl_ms = ts_f64(at + 80),
        .pending_prefill_tokens = ts_u64(at + 88),
        .expected_decode_tokens = ts_u64(at + 96),
    };
}

/* The worker that holds the turn's session; false if none of the candidates does. */
TS_UNUSED static bool ts_bound_worker(ts_worker *worker) {
    ts_workers bound;
    if (!ts_read_table("workers.bound", &bound) || bound.count == 0) return false;
    *worker = ts_worker_at(&bound, 0);
    return true;
}

TS_UNUSED static bool ts_is_bound(const ts_worker *worker) { return (worker->flags & 1) != 0; }
TS_UNUSED static bool ts_is_at_limit(const ts_worker *worker) { return (worker->flags & 2) != 0; }
TS_UNUSED static bool ts_is_excluded(const ts_worker *worker) { return (worker->flags & 4) != 0; }
TS_UNUSED static bool ts_can_tag(const ts_worker *worker) { return (worker->capabilities & 1) != 0; }
TS_UNUSED static bool ts_can_stream(const ts_worker *worker) { return (worker->capabilities & 2) != 0; }
TS_UNUSED static bool ts_takes_priority(const ts_worker *worker) { return (worker->capabilities & 4) != 0; }

/* Ready and not excluded for this turn. */
TS_UNUSED static bool ts_is_candidate(const ts_worker *worker) {
    return worker->state == TS_READY && !ts_is_excluded(worker);
}

/* === decisions ==================================================================================================== */

/* What is decided is collected and written when `decide` returns. What is left out stays as earlier plugins or the built-in
 * rule have it. A value that does not fit, or is wrong, is dropped and counted by the gateway. */

static char ts_pending[8192];
static size_t ts_pending_len;

/* One decision by its name in the documentation, without `turnstile.`, for names that have no function below. */
static void ts_decide(const char *name, ts_text value) {
    static const ts_text prefix = {"turnstile.", 10};
    const size_t len = ts_length(name);
    const uint32_t name_len = (uint32_t)(prefix.len + len);
    const uint32_t value_len = (uint32_t)value.len;
    if (value.len > sizeof ts_pending || len > TS_MAX_NAME) return;
    if (8 + name_len + value_len > sizeof ts_pending - ts_pending_len) {
        ts_log(TS_WARN, TS_TEXT("a decision is too long and left out"));
        return;
    }
    char *at = ts_pending + ts_pending_len;
    memcpy(at, &name_len, 4);
    memcpy(at + 4, prefix.at, prefix.len);
    memcpy(at + 4 + prefix.len, name, len);
    memcpy(at + 4 + name_len, &value_len, 4);
    memcpy(at + 8 + name_len, value.at, value.len);
    ts_pending_len += 8 + name_len + value_len;
}

static void ts_decide_integer(const char *name, int64_t value) {
    ts_line line = {0};
    ts_put_integer(&line, value);
    ts_decide(name, ts_written(&line));
}

static void ts_put_worker(ts_line *line, uint32_t index) {
    ts_put_text(line, TS_TEXT("#"));
    ts_put_unsigned(line, index);
}

static void ts_decide_workers(const char *name, const uint32_t *indexes, size_t count) {
    ts_line line = {0};
    for (size_t i = 0; i < count; i++) {
        if (i > 0) ts_put_text(&line, TS_TEXT(","));
        ts_put_worker(&line, indexes[i]);
    }
    ts_decide(name, ts_written(&line));
}

/* Milliseconds as seconds with three decimals. */
static void ts_decide_seconds(const char *name, int64_t ms) {
    const uint64_t size = ms < 0 ? 0 - (uint64_t)ms : (uint64_t)ms;
    ts_line line = {0};
    if (ms < 0) ts_put_text(&line, TS_TEXT("-"));
    ts_put_unsigned(&line, size / 1000);
    ts_put_text(&line, TS_TEXT("."));
    ts_put_unsigned(&line, size / 100 % 10);
    ts_put_unsigned(&line, size / 10 % 10);
    ts_put_unsigned(&line, size % 10);
    ts_decide(name, ts_written(&line));
}

/* The worker to send the turn to. */
TS_UNUSED static void ts_target(uint32_t index) {
    ts_line line = {0};
    ts_put_worker(&line, index);
    ts_decide("route.target", ts_written(&line));
}

/* Workers to try next, best first, if the target fails before it answered. */
TS_UNUSED static void ts_fallbacks(const uint32_t *indexes, size_t count) {
    if (count > 0) ts_decide_workers("route.fallbacks", indexes, count);
}

/* Workers not to use for this turn. Replaces what earlier plugins excluded. */
TS_UNUSED static void ts_exclude(const uint32_t *indexes, size_t count) {
    if (count > 0) ts_decide_workers("route.exclude", indexes, count);
}

/* Cost of workers in whole ms, lower is better: for the decision log and for policies that follow. */
TS_UNUSED static void ts_scores(const uint32_t *indexes, const int64_t *costs_ms, size_t count) {
    ts_line line = {0};
    ts_put_text(&line, TS_TEXT("{"));
    for (size_t i = 0; i < count; i++) {
        if (i > 0) ts_put_text(&line, TS_TEXT(","));
        ts_put_text(&line, TS_TEXT("\""));
        ts_put_worker(&line, indexes[i]);
        ts_put_text(&line, TS_TEXT("\":"));
        ts_put_integer(&line, costs_ms[i]);
    }
    ts_put_text(&line, TS_TEXT("}"));
    if (count > 0) ts_decide("route.scores", ts_written(&line));
}

/* Why, in a few words, for the decision log. */
TS_UNUSED static void ts_reason(ts_text text) { ts_decide("route.reason", text); }
/* Strict tier in the queue; higher goes first, always. */
TS_UNUSED static void ts_tier(uint32_t tier) { ts_decide_integer("queue.tier", tier); }
/* Head start in the queue, ms of arrival time; negative lets others pass. */
TS_UNUSED static void ts_head_start_ms(int64_t ms) { ts_decide_seconds("queue.priority", ms); }
/* Give up waiting in the queue after this many ms. */
TS_UNUSED static void ts_deadline_ms(uint32_t ms) { ts_decide_integer("queue.deadline_ms", ms); }
/* Turns of one flow share one fair part of the fleet. */
TS_UNUSED static void ts_flow(ts_text flow) { ts_decide("queue.flow", flow); }
/* The session's id, instead of the client's. */
TS_UNUSED static void ts_session_key(ts_text key) { ts_decide("session.key", key); }
/* The session's idle timeout, ms from the end of a turn. */
TS_UNUSED static void ts_session_ttl_ms(int64_t ms) { ts_decide_seconds("session.ttl_s", ms); }
/* Whether the next turn is warmed after this one. */
TS_UNUSED static void ts_prefill(bool on) { ts_decide("prefill", on ? TS_TEXT("on") : TS_TEXT("off")); }
/* The priority sent to the worker. */
TS_UNUSED static void ts_engine_priority(int64_t priority) { ts_decide_integer("engine.priority", priority); }
/* No priority is sent to the worker, even if the client gave one. */
TS_UNUSED static void ts_no_engine_priority(void) { ts_decide("engine.priority", TS_TEXT("none")); }

typedef enum { TS_BIND, TS_OPEN, TS_CLOSE, TS_RELEASE, TS_NOTHING } ts_session_action;

/* What happens to the turn's session. */
TS_UNUSED static void ts_session(ts_session_action action) {
    static const char *const names[] = {"bind", "open", "close", "release", "none"};
    ts_decide("session.action", ts_of(names[action]));
}

typedef enum { TS_AFFINITY, TS_TAG, TS_STREAM, TS_AUTO } ts_session_mode;

/* How the engine takes part in the session. */
TS_UNUSED static void ts_mode(ts_session_mode mode) {
    static const char *const names[] = {"affinity", "tag", "stream", "auto"};
    ts_decide("session.mode", ts_of(names[mode]));
}

/* A note in the decision log, under a name of letters, digits, `_`, `-` and `.`. */
TS_UNUSED static void ts_note(const char *name, ts_text text) {
    char path[TS_MAX_NAME + 1];
    const size_t len = ts_length(name);
    if (len > TS_MAX_NAME - 4) return;
    memcpy(path, "log.", 4);
    memcpy(path + 4, name, len + 1);
    ts_decide(path, text);
}

TS_UNUSED static void ts_note_integer(const char *name, int64_t number) {
    ts_line line = {0};
    ts_put_integer(&line, number);
    ts_note(name, ts_written(&line));
}

/* Writes what was decided, by one call, or one by one where the host has no such function. */
static void ts_write_decisions(void) {
    ts_text ignored;
    const size_t len = ts_pending_len;
    ts_pending_len = 0;
    if (len == 0 || ts_call("turnstile.write", (ts_text){ts_pending, len}, &ignored)) return;
    for (size_t at = 0; at < len;) {
        const uint32_t name_len = ts_u32(ts_pending + at);
        const char *name = ts_pending + at + 4;
        const uint32_t value_len = ts_u32(name + name_len);
        (void)ts_host_set_property(name, name_len, name + name_len + 4, value_len);
        at += 8 + name_len + value_len;
    }
}

/* === options ====================================================================================================== */

/* The plugin's `config` table: JSON of the gateway's. Ask for each option once; what was not asked for is unknown, and
 * refused. Options are integers, booleans and texts. */
typedef struct {
    ts_text json;
    ts_text known[32];
    size_t known_count;
    bool failed;
} ts_options;

static void ts_option_wrong(ts_options *options, ts_text name, const char *what) {
    ts_line line = {0};
    ts_put(&line, "option `");
    ts_put_text(&line, name);
    ts_put(&line, "`: ");
    ts_put(&line, what);
    ts_log(TS_ERROR, ts_written(&line));
    options->failed = true;
}

static size_t ts_skip_space(ts_text json, size_t at) {
    while (at < json.len && (json.at[at] == ' ' || json.at[at] == '\n' || json.at[at] == '\t' || json.at[at] == '\r')) at++;
    return at;
}

/* The end of the JSON value that begins at `at`. The gateway's JSON is sound, so this need not tell what is wrong. */
static size_t ts_skip_value(ts_text json, size_t at) {
    size_t depth = 0;
    for (; at < json.len; at++) {
        const char c = json.at[at];
        if (c == '"') {
            for (at++; at < json.len && json.at[at] != '"'; at++) {
                if (json.at[at] == '\\') at++;
            }
            if (depth == 0) return at < json.len ? at + 1 : json.len;
        } else if (c == '{' || c == '[') {
            depth++;
        } else if (c == '}' || c == ']') {
            if (depth == 0) return at;
            if (--depth == 0) return at + 1;
        } else if (depth == 0 && (c == ',' || c == ':')) {
            return at;
        }
    }
    return at;
}

/* The next member at `*at`; false at the end. */
static bool ts_next_member(ts_text json, size_t *at, ts_text *name, ts_text *value) {
    size_t i = ts_skip_space(json, *at);
    if (i < json.len && (json.at[i] == '{' || json.at[i] == ',')) i = ts_skip_space(json, i + 1);
    if (i >= json.len || json.at[i] != '"') return false;
    const size_t name_end = ts_skip_value(json, i);
    *name = (ts_text){json.at + i + 1, name_end > i + 2 ? name_end - i - 2 : 0};
    i = ts_skip_space(json, name_end);
    if (i >= json.len || json.at[i] != ':') return false;
    i = ts_skip_space(json, i + 1);
    size_t end = ts_skip_value(json, i);
    *at = end;
    while (end > i && (json.at[end - 1] == ' ' || json.at[end - 1] == '\n')) end--;
    *value = (ts_text){json.at + i, end - i};
    return true;
}

/* The JSON of an option; false if it was not given. */
static bool ts_option(ts_options *options, const char *name, ts_text *value) {
    const ts_text wanted = ts_of(name);
    if (options->known_count < sizeof options->known / sizeof options->known[0]) {
        options->known[options->known_count++] = wanted;
    }
    ts_text member;
    for (size_t at = 0; ts_next_member(options->json, &at, &member, value);) {
        if (ts_same(member, wanted)) return true;
    }
    return false;
}

/* An integer option from `least` to `most`. */
TS_UNUSED static int64_t ts_option_integer(ts_options *options, const char *name, int64_t otherwise, int64_t least,
                                           int64_t most) {
    ts_text json;
    int64_t value = otherwise;
    if (!ts_option(options, name, &json)) return otherwise;
    if (!ts_read_integer(json, &value)) {
        ts_option_wrong(options, ts_of(name), "must be an integer");
    } else if (value < least || value > most) {
        ts_line line = {0};
        ts_put(&line, "must be ");
        ts_put_integer(&line, least);
        ts_put(&line, " to ");
        ts_put_integer(&line, most);
        ts_put_text(&line, (ts_text){"", 1});
        ts_option_wrong(options, ts_of(name), line.at);
    }
    return value;
}

TS_UNUSED static bool ts_option_flag(ts_options *options, const char *name, bool otherwise) {
    ts_text json;
    if (!ts_option(options, name, &json)) return otherwise;
    if (ts_same(json, TS_TEXT("true"))) return true;
    if (!ts_same(json, TS_TEXT("false"))) ts_option_wrong(options, ts_of(name), "must be true or false");
    return false;
}

/* A text option without escapes, valid until `configure` returns: copy it into a variable of the policy. */
TS_UNUSED static ts_text ts_option_text(ts_options *options, const char *name, ts_text otherwise) {
    ts_text json;
    if (!ts_option(options, name, &json)) return otherwise;
    if (json.len < 2 || json.at[0] != '"') {
        ts_option_wrong(options, ts_of(name), "must be a text");
        return otherwise;
    }
    for (size_t i = 0; i < json.len; i++) {
        if (json.at[i] == '\\') {
            ts_option_wrong(options, ts_of(name), "must be a text without escapes");
            return otherwise;
        }
    }
    return (ts_text){json.at + 1, json.len - 2};
}

/* Reads the options, asks the policy for them, and refuses what it did not ask for. */
static bool ts_configure(size_t size, bool (*configure)(ts_options *)) {
    ts_options options = {0};
    ts_text json = {"", 0};
    if (size > 0) (void)ts_host_get_buffer(TS_BUFFER_PLUGIN_CONFIGURATION, 0, size, &json.at, &json.len);
    options.json = json;
    const bool accepted = configure(&options);
    ts_text name, value;
    for (size_t at = 0; ts_next_member(json, &at, &name, &value);) {
        bool known = false;
        for (size_t i = 0; i < options.known_count; i++) known = known || ts_same(name, options.known[i]);
        if (!known) ts_option_wrong(&options, name, "unknown");
    }
    return accepted && !options.failed;
}

/* === events ======================================================================================================= */

typedef enum {
    TS_FIRST_TOKEN, /* a stream has brought its first token; comes before everything else */
    TS_TOOL_CALL,   /* a tool is called: `number` and `name` */
    TS_FINISH,      /* generation has ended: `reason` */
    TS_USAGE,       /* the answer has ended: its tokens, as far as the worker told them */
    TS_END,         /* the turn has ended: `outcome` and `status`; comes last */
} ts_event_kind;

/* Something that happened in the answer to a turn. What does not belong to its kind is empty. */
typedef struct {
    ts_event_kind kind;
    int64_t at_ms;             /* from the arrival of the request */
    int64_t number;            /* place of a tool call among those of the answer, from 0 */
    ts_text name;              /* of the tool that is called */
    ts_text reason;            /* why generation ended, such as stop, length or tool_calls */
    int64_t prompt_tokens;     /* cached ones included; -1: not told */
    int64_t completion_tokens; /* generated; -1: not told */
    int64_t cached_tokens;     /* of the prompt; -1: not told */
    ts_text outcome;           /* as in the access log: finished, client_gone, cut, timeout, refused and others */
    int64_t status;            /* that the client got */
    int64_t left_out;          /* events that were not told because there were too many of their kind */
} ts_event;

static int ts_hex(char c) {
    if (c >= '0' && c <= '9') return c - '0';
    if (c >= 'a' && c <= 'f') return c - 'a' + 10;
    return c >= 'A' && c <= 'F' ? c - 'A' + 10 : 0;
}

/* The text of a JSON string; empty for any other value. */
TS_UNUSED static ts_text ts_unquote(ts_text json) {
    if (json.len < 2 || json.at[0] != '"') return (ts_text){"", 0};
    char *text = ts_allocate(json.len);
    size_t len = 0;
    for (size_t i = 1; i + 1 < json.len; i++) {
        char c = json.at[i];
        if (c == '\\' && i + 2 < json.len) {
            c = json.at[++i];
            if (c == 'u' && i + 5 < json.len) {
                const unsigned code = (unsigned)(ts_hex(json.at[i + 1]) << 12 | ts_hex(json.at[i + 2]) << 8 |
                                                 ts_hex(json.at[i + 3]) << 4 | ts_hex(json.at[i + 4]));
                i += 4;
                /* The gateway writes what is not ASCII as it is. */
                c = code < 0x80 ? (char)code : '?';
            } else if (c == 'n') {
                c = '\n';
            } else if (c == 't') {
                c = '\t';
            } else if (c == 'r') {
                c = '\r';
            } else if (c == 'b') {
                c = '\b';
            } else if (c == 'f') {
                c = '\f';
            }
        }
        text[len++] = c;
    }
    return (ts_text){text, len};
}

/* Reads an event; false for one that is not known here. */
TS_UNUSED static bool ts_read_event(size_t size, ts_event *event) {
    static const char *const kinds[] = {"first_token", "tool_call", "finish", "usage", "end"};
    ts_text json = {"", 0}, name, value;
    *event = (ts_event){.prompt_tokens = -1, .completion_tokens = -1, .cached_tokens = -1};
    if (ts_host_get_buffer(TS_BUFFER_CALL_DATA, 0, size, &json.at, &json.len) != TS_STATUS_OK) return false;
    const struct {
        const char *name;
        ts_text *text;
        int64_t *number;
    } members[] = {
        {"at_ms", NULL, &event->at_ms},
        {"number", NULL, &event->number},
        {"name", &event->name, NULL},
        {"reason", &event->reason, NULL},
        {"prompt_tokens", NULL, &event->prompt_tokens},
        {"completion_tokens", NULL, &event->completion_tokens},
        {"cached_tokens", NULL, &event->cached_tokens},
        {"outcome", &event->outcome, NULL},
        {"status", NULL, &event->status},
        {"left_out", NULL, &event->left_out},
    };
    bool known = false;
    for (size_t at = 0; ts_next_member(json, &at, &name, &value);) {
        if (ts_same(name, TS_TEXT("event"))) {
            const ts_text kind = ts_unquote(value);
            for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++) {
                if (!ts_same(kind, ts_of(kinds[i]))) continue;
                event->kind = (ts_event_kind)i;
                known = true;
            }
        }
        for (size_t i = 0; i < sizeof members / sizeof members[0]; i++) {
            if (!ts_same(name, ts_of(members[i].name))) continue;
            if (members[i].text != NULL) *members[i].text = ts_unquote(value);
            if (members[i].number != NULL) (void)ts_read_integer(value, members[i].number);
        }
    }
    return known;
}

/* === the module's exports ========================================================================================= */

/* Makes the module: `configure` reads the options and returns whether they will do, `decide` is asked about each turn. */
#define TS_POLICY(configure, decide)                                                                                  \
    TS_EXPORT("proxy_abi_version_0_2_1") void ts_abi(void) {}                                                         \
    TS_EXPORT("malloc") void *ts_malloc(size_t len) { return ts_allocate(len); }                                      \
    TS_EXPORT("proxy_on_context_create") void ts_create(uint32_t context, uint32_t parent) {                          \
        (void)context, (void)parent;                                                                                  \
    }                                                                                                                 \
    TS_EXPORT("proxy_on_vm_start") int32_t ts_start(uint32_t root, size_t size) { return (void)root, (void)size, 1; } \
    TS_EXPORT("proxy_on_configure") int32_t ts_on_configure(uint32_t root, size_t size) {                             \
        (void)root;                                                                                                   \
        ts_forget_all();                                                                                              \
        return ts_configure(size, configure);                                                                         \
    }                                                                                                                 \
    TS_EXPORT("proxy_on_request_headers") int32_t ts_on_request(uint32_t context, uint32_t count, uint32_t end) {     \
        (void)context, (void)count, (void)end;                                                                        \
        ts_forget_all();                                                                                              \
        ts_pending_len = 0;                                                                                           \
        (decide)();                                                                                                   \
        ts_write_decisions();                                                                                         \
        return 0;                                                                                                     \
    }

/* Beside TS_POLICY: `listen` is told of what happens in the answer while it comes, of the kinds that the plugin's option `events`
 * names. The facts of the turn can be read; it is too late for decisions. */
#define TS_EVENTS(listen)                                                                                             \
    TS_EXPORT("proxy_on_foreign_function") void ts_on_function(uint32_t context, uint32_t function, size_t size) {    \
        (void)context;                                                                                                \
        enum { TS_EVENT_FUNCTION = 1 };                                                                               \
        ts_event event;                                                                                               \
        ts_forget_all();                                                                                              \
        if (function == TS_EVENT_FUNCTION && ts_read_event(size, &event)) (listen)(&event);                           \
    }

/* Beside TS_POLICY: `finished` is called when a turn has ended, and reads the facts of the end. */
#define TS_FINISHED(finished)                                                                                         \
    TS_EXPORT("proxy_on_log") void ts_on_log(uint32_t context) {                                                      \
        (void)context;                                                                                                \
        ts_forget_all();                                                                                              \
        (finished)();                                                                                                 \
    }

#endif
