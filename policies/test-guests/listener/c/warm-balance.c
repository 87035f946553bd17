/* Logs every event that it is told of. The same in every language of the SDKs. */
#include "turnstile.h"

static bool configure(ts_options *options) { return (void)options, true; }

static void decide(void) {}

static void put_number(ts_line *line, int64_t number) {
    ts_put(line, " ");
    ts_put_integer(line, number);
}

static void listen(const ts_event *event) {
    static const char *const names[] = {"first_token", "tool_call", "finish", "usage", "end"};
    ts_text model = {"", 0};
    ts_line line = {0};
    (void)ts_model(&model);
    ts_put_text(&line, model);
    ts_put(&line, " ");
    ts_put(&line, names[event->kind]);
    switch (event->kind) {
    case TS_FIRST_TOKEN: break;
    case TS_TOOL_CALL:
        put_number(&line, event->number);
        ts_put(&line, " ");
        ts_put_text(&line, event->name);
        break;
    case TS_FINISH:
        ts_put(&line, " ");
        ts_put_text(&line, event->reason);
        break;
    case TS_USAGE:
        put_number(&line, event->prompt_tokens);
        put_number(&line, event->completion_tokens);
        put_number(&line, event->cached_tokens);
        break;
    case TS_END:
        ts_put(&line, " ");
        ts_put_text(&line, event->outcome);
        put_number(&line, event->status);
        put_number(&line, event->left_out);
        break;
    }
    ts_log(TS_INFO, ts_written(&line));
}

TS_POLICY(configure, decide)
TS_EVENTS(listen)
