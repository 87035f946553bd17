/* The imports of the probe, and the table by which a program calls them.
 *
 * A verb is an import's name without `proxy_`. Its shape says what its arguments are, in the order of the ABI:
 *   i  a number                      s  bytes: pointer and length
 *   m  a map: pointer and length     l  a 64-bit number
 *   r  bytes that the host returns   w  a u32 that the host stores    d  a u64 that the host stores
 *   p  as r, shown as a map          b  as s, a property path: dots of a bare word become NULs
 */
#ifndef IMPORTS_H
#define IMPORTS_H

typedef unsigned char u8;
typedef int i32;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

#define IMPORT(name) __attribute__((import_module("env"), import_name(#name))) extern i32 name
#define EXPORT(name) __attribute__((export_name(#name))) name

IMPORT(proxy_log)(u32, u32, u32);
IMPORT(proxy_get_log_level)(u32);
IMPORT(proxy_get_current_time_nanoseconds)(u32);
IMPORT(proxy_set_tick_period_milliseconds)(u32);
IMPORT(proxy_get_buffer_bytes)(u32, u32, u32, u32, u32);
IMPORT(proxy_set_buffer_bytes)(u32, u32, u32, u32, u32);
IMPORT(proxy_get_buffer_status)(u32, u32, u32);
IMPORT(proxy_get_header_map_size)(u32, u32);
IMPORT(proxy_get_header_map_pairs)(u32, u32, u32);
IMPORT(proxy_set_header_map_pairs)(u32, u32, u32);
IMPORT(proxy_get_header_map_value)(u32, u32, u32, u32, u32);
IMPORT(proxy_add_header_map_value)(u32, u32, u32, u32, u32);
IMPORT(proxy_replace_header_map_value)(u32, u32, u32, u32, u32);
IMPORT(proxy_remove_header_map_value)(u32, u32, u32);
IMPORT(proxy_get_property)(u32, u32, u32, u32);
IMPORT(proxy_set_property)(u32, u32, u32, u32);
IMPORT(proxy_send_local_response)(u32, u32, u32, u32, u32, u32, u32, i32);
IMPORT(proxy_http_call)(u32, u32, u32, u32, u32, u32, u32, u32, u32, u32);
IMPORT(proxy_grpc_call)(u32, u32, u32, u32, u32, u32, u32, u32, u32, u32, u32, u32);
IMPORT(proxy_grpc_stream)(u32, u32, u32, u32, u32, u32, u32, u32, u32);
IMPORT(proxy_grpc_send)(u32, u32, u32, u32);
IMPORT(proxy_grpc_cancel)(u32);
IMPORT(proxy_grpc_close)(u32);
IMPORT(proxy_get_status)(u32, u32, u32);
IMPORT(proxy_get_shared_data)(u32, u32, u32, u32, u32);
IMPORT(proxy_set_shared_data)(u32, u32, u32, u32, u32);
IMPORT(proxy_register_shared_queue)(u32, u32, u32);
IMPORT(proxy_resolve_shared_queue)(u32, u32, u32, u32, u32);
IMPORT(proxy_dequeue_shared_queue)(u32, u32, u32);
IMPORT(proxy_enqueue_shared_queue)(u32, u32, u32);
IMPORT(proxy_define_metric)(u32, u32, u32, u32);
IMPORT(proxy_increment_metric)(u32, i64);
IMPORT(proxy_record_metric)(u32, u64);
IMPORT(proxy_get_metric)(u32, u32);
IMPORT(proxy_set_effective_context)(u32);
IMPORT(proxy_done)(void);
IMPORT(proxy_call_foreign_function)(u32, u32, u32, u32, u32, u32);
#ifdef ABI_0_1_0
IMPORT(proxy_get_configuration)(u32, u32);
IMPORT(proxy_continue_request)(void);
IMPORT(proxy_continue_response)(void);
IMPORT(proxy_clear_route_cache)(void);
#else
IMPORT(proxy_continue_stream)(u32);
IMPORT(proxy_close_stream)(u32);
#endif
#ifdef HIGRESS
IMPORT(proxy_redis_init)(u32, u32, u32, u32, u32, u32, u32);
IMPORT(proxy_redis_call)(u32, u32, u32, u32, u32);
IMPORT(proxy_get_upstream_hosts)(u32, u32);
IMPORT(proxy_set_upstream_override_host)(u32, u32);
IMPORT(proxy_inject_encoded_data_to_filter_chain)(u32, u32, u32);
#endif
#ifdef WASI
#define WASI_IMPORT(name) __attribute__((import_module("wasi_snapshot_preview1"), import_name(#name))) extern i32 wasi_##name
WASI_IMPORT(environ_get)(u32, u32);
WASI_IMPORT(environ_sizes_get)(u32, u32);
WASI_IMPORT(args_sizes_get)(u32, u32);
WASI_IMPORT(clock_time_get)(u32, u64, u32);
WASI_IMPORT(random_get)(u32, u32);
WASI_IMPORT(fd_write)(u32, u32, u32, u32);
WASI_IMPORT(fd_prestat_get)(u32, u32);
WASI_IMPORT(fd_fdstat_get)(u32, u32);
WASI_IMPORT(fd_read)(u32, u32, u32, u32);
WASI_IMPORT(path_open)(u32, u32, u32, u32, u32, u64, u64, u32, u32);
WASI_IMPORT(poll_oneoff)(u32, u32, u32, u32);
WASI_IMPORT(sched_yield)(void);
__attribute__((import_module("wasi_snapshot_preview1"), import_name("proc_exit"), noreturn)) extern void
    wasi_proc_exit(u32);
#endif

typedef struct {
  const char *name;
  void (*call)(void);
  const char *shape;
} Verb;

#define VERB(name, shape) {#name, (void (*)(void))proxy_##name, shape}

static const Verb VERBS[] = {
    VERB(log, "is"),
    VERB(get_log_level, "w"),
    VERB(get_current_time_nanoseconds, "d"),
    VERB(set_tick_period_milliseconds, "i"),
    VERB(get_buffer_bytes, "iiir"),
    VERB(set_buffer_bytes, "iiis"),
    VERB(get_buffer_status, "iww"),
    VERB(get_header_map_size, "iw"),
    VERB(get_header_map_pairs, "ip"),
    VERB(set_header_map_pairs, "im"),
    VERB(get_header_map_value, "isr"),
    VERB(add_header_map_value, "iss"),
    VERB(replace_header_map_value, "iss"),
    VERB(remove_header_map_value, "is"),
    VERB(get_property, "br"),
    VERB(set_property, "bs"),
    VERB(send_local_response, "issmi"),
    VERB(http_call, "smsmiw"),
    VERB(grpc_call, "sssmsiw"),
    VERB(grpc_stream, "sssmw"),
    VERB(grpc_send, "isi"),
    VERB(grpc_cancel, "i"),
    VERB(grpc_close, "i"),
    VERB(get_status, "wr"),
    VERB(get_shared_data, "srw"),
    VERB(set_shared_data, "ssi"),
    VERB(register_shared_queue, "sw"),
    VERB(resolve_shared_queue, "ssw"),
    VERB(dequeue_shared_queue, "ir"),
    VERB(enqueue_shared_queue, "is"),
    VERB(define_metric, "isw"),
    VERB(increment_metric, "il"),
    VERB(record_metric, "il"),
    VERB(get_metric, "id"),
    VERB(set_effective_context, "i"),
    VERB(done, ""),
    VERB(call_foreign_function, "ssr"),
#ifdef ABI_0_1_0
    VERB(get_configuration, "r"),
    VERB(continue_request, ""),
    VERB(continue_response, ""),
    VERB(clear_route_cache, ""),
#else
    VERB(continue_stream, "i"),
    VERB(close_stream, "i"),
#endif
#ifdef HIGRESS
    VERB(redis_init, "sssi"),
    VERB(redis_call, "ssw"),
    VERB(get_upstream_hosts, "p"),
    VERB(set_upstream_override_host, "s"),
    VERB(inject_encoded_data_to_filter_chain, "si"),
#endif
};

#define VERB_COUNT (sizeof(VERBS) / sizeof(VERBS[0]))

typedef struct {
  const char *name;
  i64 value;
} Word;

/* Numbers by name. */
static const Word WORDS[] = {
    {"continue", 0},         {"pause", 1},
    {"trace", 0},            {"debug", 1},
    {"info", 2},             {"warn", 3},
    {"error", 4},            {"critical", 5},
    {"request", 0},          {"response", 1},
    {"downstream", 2},       {"upstream", 3},
    {"request_body", 0},     {"response_body", 1},
    {"downstream_data", 2},  {"upstream_data", 3},
    {"call_body", 4},        {"grpc_message", 5},
    {"vm_config", 6},        {"plugin_config", 7},
    {"foreign_arguments", 8}, {"redis_response", 9},
    {"request_headers", 0},  {"request_trailers", 1},
    {"response_headers", 2}, {"response_trailers", 3},
    {"grpc_initial", 4},     {"grpc_trailing", 5},
    {"call_headers", 6},     {"call_trailers", 7},
    {"counter", 0},          {"gauge", 1},
    {"histogram", 2},        {"max", 0xffffffffLL},
};

/* Statuses by number. */
static const char *const STATUSES[] = {
    "OK", "NOT_FOUND", "BAD_ARGUMENT", "SERIALIZATION_FAILURE", "PARSE_FAILURE", "BAD_EXPRESSION",
    "INVALID_MEMORY_ACCESS", "EMPTY", "CAS_MISMATCH", "RESULT_MISMATCH", "INTERNAL_FAILURE", "BROKEN_CONNECTION",
    "UNIMPLEMENTED",
};

#endif
