/* The probe: a guest that does what its configuration tells it, and logs what came of it. ../README.md describes its
 * programs. It has no library behind it: all it knows of the host are the imports of the ABI.
 *
 * Variants, by macro: ABI_0_1_0 and ABI_0_2_0 (markers and callbacks of the older versions), HIGRESS (marker 0.2.100 with
 * its imports), WASI (imports of wasi_snapshot_preview1).
 */
#include "program.h"

/* ---- calls ---- */

typedef i32 (*F0)(void);
typedef i32 (*F1)(u32);
typedef i32 (*F2)(u32, u32);
typedef i32 (*F3)(u32, u32, u32);
typedef i32 (*F4)(u32, u32, u32, u32);
typedef i32 (*F5)(u32, u32, u32, u32, u32);
typedef i32 (*F6)(u32, u32, u32, u32, u32, u32);
typedef i32 (*F7)(u32, u32, u32, u32, u32, u32, u32);
typedef i32 (*F8)(u32, u32, u32, u32, u32, u32, u32, u32);
typedef i32 (*F9)(u32, u32, u32, u32, u32, u32, u32, u32, u32);
typedef i32 (*F10)(u32, u32, u32, u32, u32, u32, u32, u32, u32, u32);
typedef i32 (*F12)(u32, u32, u32, u32, u32, u32, u32, u32, u32, u32, u32, u32);
typedef i32 (*FL)(u32, i64);

static i32 call(const Verb *verb, const u32 *a, u32 count, i64 wide) {
  void (*f)(void) = verb->call;
  if (verb->shape[0] == 'i' && verb->shape[1] == 'l') return ((FL)f)(a[0], wide);
  switch (count) {
    case 0: return ((F0)f)();
    case 1: return ((F1)f)(a[0]);
    case 2: return ((F2)f)(a[0], a[1]);
    case 3: return ((F3)f)(a[0], a[1], a[2]);
    case 4: return ((F4)f)(a[0], a[1], a[2], a[3]);
    case 5: return ((F5)f)(a[0], a[1], a[2], a[3], a[4]);
    case 6: return ((F6)f)(a[0], a[1], a[2], a[3], a[4], a[5]);
    case 7: return ((F7)f)(a[0], a[1], a[2], a[3], a[4], a[5], a[6]);
    case 8: return ((F8)f)(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7]);
    case 9: return ((F9)f)(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8]);
    case 10: return ((F10)f)(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9]);
    default: return ((F12)f)(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11]);
  }
}

static const Verb *verb_of(Text name) {
  for (u32 i = 0; i < VERB_COUNT; i++)
    if (is(name, VERBS[i].name)) return &VERBS[i];
  return 0;
}

/* A call as the ABI has it: arguments made of words, results shown and kept. */
static void call_verb(const Verb *verb, Text whole, Text rest, i32 quiet) {
  u32 a[12] = {0}, count = 0, results = 0;
  u32 out[8] = {0};
  i64 wide = 0;
  for (const char *s = verb->shape; *s; s++) {
    Text t;
    switch (*s) {
      case 'i': a[count++] = (u32)number(word(&rest)); break;
      case 'l': wide = number(word(&rest)); break;
      case 's': case 'b': case 'm':
        t = *s == 'm' ? map(word(&rest)) : bytes(word(&rest), *s == 'b');
        a[count++] = (u32)t.at;
        a[count++] = t.len;
        break;
      case 'r': case 'p':
        a[count++] = (u32)&out[results];
        a[count++] = (u32)&out[results + 1];
        results += 2;
        break;
      default:
        a[count++] = (u32)&out[results];
        results += 2;
        break;
    }
  }
  i32 status = call(verb, a, count, wide);
  last_status = status;
  Line line;
  begin(&line);
  put_raw(&line, whole);
  put_text(&line, " = ");
  put_status(&line, status);
  if (status == 0) {
    u32 at = 0;
    for (const char *s = verb->shape; *s; s++) {
      if (*s != 'r' && *s != 'p' && *s != 'w' && *s != 'd') continue;
      i64 value = *s == 'd' ? (i64)((u64)out[at] | (u64)out[at + 1] << 32) : (i64)out[at];
      put(&line, ' ');
      if (*s == 'r' || *s == 'p') {
        last = (Text){(const u8 *)out[at], out[at + 1]};
        if (*s == 'p') put_map(&line, last);
        else put_bytes(&line, last);
      } else {
        Text name = word(&rest);
        if (name.len == 2 && name.at[0] == '=') {
          /* Kept, and not shown: ids are the host's affair. */
          variables[name.at[1] - 'a'] = value;
          line.len--;
        } else {
          put_number(&line, value);
        }
      }
      at += 2;
    }
  }
  Text more = word(&rest);
  if (status == 0 && more.len) complain("too many arguments", whole);
  if (!quiet) say(&line);
}

/* A call with numbers for all arguments, pointers among them; quoted bytes are a pointer and a length. */
static void call_raw(Text whole, Text rest) {
  const Verb *verb = verb_of(word(&rest));
  if (!verb) return complain("no such import", whole);
  u32 a[12] = {0}, count = 0;
  i64 wide = 0;
  for (Text w = word(&rest); w.len && count < 11; w = word(&rest)) {
    if (w.at[0] == '"') {
      Text t = bytes(w, 0);
      a[count++] = (u32)t.at;
      a[count++] = t.len;
    } else {
      wide = number(w);
      a[count++] = (u32)wide;
    }
  }
  last_status = call(verb, a, count, wide);
  Line line;
  begin(&line);
  put_raw(&line, whole);
  put_text(&line, " = ");
  put_status(&line, last_status);
  say(&line);
}

/* ---- running ---- */

__attribute__((noinline, optnone)) static u32 recurse(u32 n) {
  volatile u32 here = n;
  return here == 0xffffffffu ? 0 : recurse(here + 1) + here;
}

static void grow(Text whole, u32 pages) {
  Line line;
  begin(&line);
  put_raw(&line, whole);
  put_text(&line, __builtin_wasm_memory_grow(0, pages) == (u32)-1 ? " = refused" : " = grown");
  say(&line);
}

static i32 holds(Text rest) {
  Text a = word(&rest), op = word(&rest), b = word(&rest);
  i32 equal, less = 0;
  if (is(a, "$text")) {
    equal = same(last, bytes(b, 0));
  } else {
    i64 left = number(a), right = number(b);
    equal = left == right;
    less = left < right;
  }
  if (is(op, "==")) return equal;
  if (is(op, "!=")) return !equal;
  if (is(op, "<")) return less;
  if (is(op, ">")) return !less && !equal;
  complain("no such comparison", op);
  return 0;
}

/* Skips to the `end` of the block that begins before `at`, or behind its `else`. */
static u32 skip(u32 at, i32 stops_at_else) {
  i32 depth = 0;
  while (at < program_len) {
    Text line = line_at(&at);
    Text first = word(&line);
    if (is(first, "if")) depth++;
    else if (is(first, "end") && depth-- == 0) return at;
    else if (stops_at_else && depth == 0 && is(first, "else")) return at;
  }
  return at;
}

static u32 section(const char *name) {
  u32 at = 0;
  while (at < program_len) {
    Text line = line_at(&at);
    if (is(word(&line), "on") && is(word(&line), name)) return at;
  }
  return program_len;
}

typedef struct {
  u32 from, left;
} Loop;

#ifdef WASI
#include "wasi.h"
#endif

/* One line. Where to go on; 0 ends the section, with `*returned`. */
static u32 step(Text line, u32 next, Loop *loops, u32 *depth, i32 *returned) {
  Text whole = line, rest = line;
  Text verb = word(&rest);
  i32 quiet = is(verb, "-");
  if (quiet) {
    while (rest.len && *rest.at == ' ') rest.at++, rest.len--;
    whole = rest;
    verb = word(&rest);
  }
  const Verb *known = verb_of(verb);
  if (verb.len == 0 || verb.at[0] == '#') {
  } else if (known) {
    call_verb(known, whole, rest, quiet);
  } else if (is(verb, "raw")) {
    call_raw(whole, rest);
  } else if (is(verb, "take")) {
    /* Pointer and length from where a raw call had them stored. */
    u32 pointer = load32((const u8 *)(u32)number(word(&rest)));
    last = (Text){(const u8 *)pointer, load32((const u8 *)(u32)number(word(&rest)))};
  } else if (is(verb, "note")) {
    Line said;
    begin(&said);
    for (Text w = word(&rest), first = w; w.len; w = word(&rest)) {
      if (w.at != first.at) put(&said, ' ');
      if (is(w, "$text")) put_bytes(&said, last);
      else if (is(w, "$status")) put_status(&said, last_status);
      else if (w.at[0] == '$') put_number(&said, number(w));
      else put_raw(&said, w.at[0] == '"' ? bytes(w, 0) : w);
    }
    say(&said);
  } else if (is(verb, "return")) {
    *returned = (i32)number(word(&rest));
    return 0;
  } else if (is(verb, "let") || is(verb, "add")) {
    Text name = word(&rest);
    i64 value = number(word(&rest));
    i64 *variable = &variables[(name.len ? name.at[0] - 'a' : 0) % 26];
    *variable = is(verb, "add") ? *variable + value : value;
  } else if (is(verb, "parse")) {
    Text name = word(&rest);
    i64 value = 0;
    for (u32 i = 0; i < last.len; i++) value = value * 10 + (last.at[i] - '0');
    variables[(name.len ? name.at[0] - 'a' : 0) % 26] = value;
  } else if (is(verb, "if")) {
    if (!holds(rest)) return skip(next, 1);
  } else if (is(verb, "else")) {
    return skip(next, 0);
  } else if (is(verb, "repeat")) {
    u32 times = (u32)number(word(&rest));
    if (times == 0 || *depth == 8) complain("no such loop", whole);
    loops[(*depth)++] = (Loop){next, times - 1};
  } else if (is(verb, "again")) {
    if (*depth && loops[*depth - 1].left) {
      loops[*depth - 1].left--;
      return loops[*depth - 1].from;
    }
    if (*depth) (*depth)--;
  } else if (is(verb, "stop")) {
    if (*depth) (*depth)--;
    u32 at = next;
    while (at < program_len) {
      Text other = line_at(&at);
      if (is(word(&other), "again")) break;
    }
    return at;
  } else if (is(verb, "end")) {
  } else if (is(verb, "trap")) {
    __builtin_trap();
  } else if (is(verb, "loop")) {
    for (volatile u32 forever = 0;; forever++) {}
  } else if (is(verb, "recurse")) {
    *returned = (i32)recurse(0);
  } else if (is(verb, "grow")) {
    grow(whole, (u32)number(word(&rest)));
  } else if (is(verb, "allocator")) {
    Text mode = word(&rest);
    allocator_mode = is(mode, "null") ? GIVES_NULL : is(mode, "outside") ? GIVES_OUTSIDE
                   : is(mode, "calls") ? CALLS_HOST : ALLOCATES;
#ifdef WASI
  } else if (wasi_step(verb, whole, rest)) {
#endif
  } else {
    complain("no such verb", whole);
  }
  return next;
}

static i32 run(const char *name, u32 count, const u32 *values, i32 returned) {
  const u32 *outer = arguments;
  u32 outer_count = argument_count;
  arguments = values;
  argument_count = count;
  Loop loops[8];
  u32 depth = 0, at = section(name);
  while (at < program_len) {
    Text line = line_at(&at), rest = line;
    if (is(word(&rest), "on")) break;
    at = step(line, at, loops, &depth, &returned);
    if (at == 0) break;
  }
  arguments = outer;
  argument_count = outer_count;
  return returned;
}

static void run_section(const char *name, u32 count, const u32 *values) { run(name, count, values, 0); }

/* Reads the program as soon as the configuration can be read. */
static void find_program(void) {
  if (program_len) return;
  u32 out[2] = {0, 0};
#ifdef ABI_0_1_0
  i32 status = proxy_get_configuration((u32)&out[0], (u32)&out[1]);
#else
  i32 status = proxy_get_buffer_bytes(7, 0, 0xffffff, (u32)&out[0], (u32)&out[1]);
#endif
  if (status != 0 || out[1] == 0) return;
  load((Text){(const u8 *)out[0], out[1]});
  for (u32 at = 0; at < program_len && !tracing;) {
    Text line = line_at(&at);
    tracing = is(line, "trace");
  }
}

/* A callback: `values` are its arguments, the context first. */
static i32 enter(const char *name, u32 count, const u32 *values, i32 usual) {
  context = values[0];
  if (running++ == 0) {
    heap = 0;
    last = filled = (Text){0, 0};
  }
  find_program();
  if (tracing) {
    Line line;
    begin(&line);
    put_text(&line, "on_");
    put_text(&line, name);
    say(&line);
  }
  /* In programs $1 is the first argument behind the context. */
  i32 returned = run(name, count - 1, values + 1, usual);
  running--;
  return returned;
}

#define ENTER(name, usual, ...) \
  const u32 values[] = {__VA_ARGS__}; \
  return enter(name, LEN(values), values, usual)
#define ENTER_VOID(name, ...) \
  const u32 values[] = {__VA_ARGS__}; \
  enter(name, LEN(values), values, 0)

/* ---- exports ---- */

#if defined(ABI_0_1_0)
void EXPORT(proxy_abi_version_0_1_0)(void) {}
#elif defined(ABI_0_2_0)
void EXPORT(proxy_abi_version_0_2_0)(void) {}
#elif defined(HIGRESS)
void EXPORT(proxy_abi_version_0_2_100)(void) {}
#else
void EXPORT(proxy_abi_version_0_2_1)(void) {}
#endif

void EXPORT(proxy_on_context_create)(u32 c, u32 parent) {
  if (parent == 0) root = c;
  ENTER_VOID("context_create", c, parent);
}
u32 EXPORT(proxy_on_vm_start)(u32 c, u32 n) { ENTER("vm_start", 1, c, n); }
u32 EXPORT(proxy_on_configure)(u32 c, u32 n) { ENTER("configure", 1, c, n); }
void EXPORT(proxy_on_tick)(u32 c) { ENTER_VOID("tick", c); }
#ifdef ABI_0_1_0
u32 EXPORT(proxy_on_request_headers)(u32 c, u32 n) { ENTER("request_headers", 0, c, n); }
u32 EXPORT(proxy_on_response_headers)(u32 c, u32 n) { ENTER("response_headers", 0, c, n); }
#else
u32 EXPORT(proxy_on_request_headers)(u32 c, u32 n, u32 e) { ENTER("request_headers", 0, c, n, e); }
u32 EXPORT(proxy_on_response_headers)(u32 c, u32 n, u32 e) { ENTER("response_headers", 0, c, n, e); }
#endif
u32 EXPORT(proxy_on_request_body)(u32 c, u32 n, u32 e) { ENTER("request_body", 0, c, n, e); }
u32 EXPORT(proxy_on_response_body)(u32 c, u32 n, u32 e) { ENTER("response_body", 0, c, n, e); }
u32 EXPORT(proxy_on_request_trailers)(u32 c, u32 n) { ENTER("request_trailers", 0, c, n); }
u32 EXPORT(proxy_on_response_trailers)(u32 c, u32 n) { ENTER("response_trailers", 0, c, n); }
void EXPORT(proxy_on_http_call_response)(u32 c, u32 t, u32 h, u32 b, u32 r) {
  ENTER_VOID("http_call_response", c, t, h, b, r);
}
void EXPORT(proxy_on_grpc_receive_initial_metadata)(u32 c, u32 t, u32 n) { ENTER_VOID("grpc_initial", c, t, n); }
void EXPORT(proxy_on_grpc_receive)(u32 c, u32 t, u32 n) { ENTER_VOID("grpc_receive", c, t, n); }
void EXPORT(proxy_on_grpc_receive_trailing_metadata)(u32 c, u32 t, u32 n) { ENTER_VOID("grpc_trailing", c, t, n); }
void EXPORT(proxy_on_grpc_close)(u32 c, u32 t, u32 s) { ENTER_VOID("grpc_close", c, t, s); }
void EXPORT(proxy_on_queue_ready)(u32 c, u32 q) { ENTER_VOID("queue_ready", c, q); }
void EXPORT(proxy_on_foreign_function)(u32 c, u32 f, u32 n) { ENTER_VOID("foreign_function", c, f, n); }
u32 EXPORT(proxy_on_done)(u32 c) { ENTER("done", 1, c); }
void EXPORT(proxy_on_log)(u32 c) { ENTER_VOID("log", c); }
void EXPORT(proxy_on_delete)(u32 c) { ENTER_VOID("delete", c); }
#ifdef HIGRESS
void EXPORT(proxy_on_redis_call_response)(u32 c, u32 t, u32 s, u32 n) { ENTER_VOID("redis_call_response", c, t, s, n); }
#endif
