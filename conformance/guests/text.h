/* Memory, bytes, and the lines that the probe logs. */
#ifndef TEXT_H
#define TEXT_H

#include "imports.h"

typedef struct {
  const u8 *at;
  u32 len;
} Text;

#define LEN(array) (sizeof(array) / sizeof((array)[0]))

/* ---- memory ---- */

extern u8 __heap_base;
static u32 heap;
enum { ALLOCATES, GIVES_NULL, GIVES_OUTSIDE, CALLS_HOST } allocator_mode;
static i32 running; /* how deep in callbacks */
static void run_section(const char *name, u32 arguments, const u32 *values);

static u32 bump(u32 size) {
  if (heap == 0) heap = ((u32)&__heap_base + 15) & ~15u;
  u32 at = heap;
  u32 end = at + ((size + 15) & ~15u);
  if (end < at) return 0;
  u32 have = (u32)__builtin_wasm_memory_size(0);
  u32 want = (end >> 16) + 1;
  if (want > have && __builtin_wasm_memory_grow(0, want - have) == (u32)-1) return 0;
  heap = end;
  return at;
}

u32 EXPORT(proxy_on_memory_allocate)(u32 size) {
  if (allocator_mode == GIVES_NULL) return 0;
  if (allocator_mode == GIVES_OUTSIDE) return 0xffff0000u;
  if (allocator_mode == CALLS_HOST) {
    allocator_mode = ALLOCATES;
    run_section("allocate", 1, &size);
  }
  return bump(size);
}

__attribute__((optnone)) void *memcpy(void *to, const void *from, unsigned long n) {
  u8 *t = to;
  const u8 *f = from;
  while (n--) *t++ = *f++;
  return to;
}

__attribute__((optnone)) void *memset(void *to, int value, unsigned long n) {
  u8 *t = to;
  while (n--) *t++ = (u8)value;
  return to;
}

/* ---- text ---- */

static u32 length(const char *s) {
  u32 n = 0;
  while (s[n]) n++;
  return n;
}

static i32 is(Text t, const char *s) {
  u32 n = length(s);
  if (t.len != n) return 0;
  for (u32 i = 0; i < n; i++)
    if (t.at[i] != (u8)s[i]) return 0;
  return 1;
}

static i32 same(Text a, Text b) {
  if (a.len != b.len) return 0;
  for (u32 i = 0; i < a.len; i++)
    if (a.at[i] != b.at[i]) return 0;
  return 1;
}

static i32 digit(u8 c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}

/* A line in the making. What does not fit is cut. */
typedef struct {
  u8 bytes[2048];
  u32 len;
} Line;

static void put(Line *line, u8 c) {
  if (line->len < sizeof line->bytes) line->bytes[line->len++] = c;
}

static void put_text(Line *line, const char *s) {
  while (*s) put(line, (u8)*s++);
}

static void put_raw(Line *line, Text t) {
  for (u32 i = 0; i < t.len; i++) put(line, t.at[i]);
}

static void put_number(Line *line, i64 n) {
  u8 digits[24];
  u32 count = 0;
  u64 rest = n < 0 ? (u64)0 - (u64)n : (u64)n;
  if (n < 0) put(line, '-');
  do digits[count++] = (u8)('0' + rest % 10);
  while ((rest /= 10) != 0);
  while (count) put(line, digits[--count]);
}

/* Bytes as a reader can tell them apart: printable ASCII as it is, others as \xNN, long ones cut. */
static void put_bytes(Line *line, Text t) {
  static const char hex[] = "0123456789abcdef";
  if (t.len == 0) put_text(line, "(empty)");
  for (u32 i = 0; i < t.len && i < 200; i++) {
    u8 c = t.at[i];
    if (c >= 0x20 && c < 0x7f && c != '\\') {
      put(line, c);
    } else {
      put_text(line, "\\x");
      put(line, (u8)hex[c >> 4]);
      put(line, (u8)hex[c & 15]);
    }
  }
  if (t.len > 200) {
    put_text(line, "... (");
    put_number(line, t.len);
    put_text(line, " bytes)");
  }
}

static void put_status(Line *line, i32 status) {
  if (status >= 0 && status < (i32)LEN(STATUSES)) put_text(line, STATUSES[status]);
  else put_number(line, status);
}

static void begin(Line *line) {
  line->len = 0;
  put_text(line, "> ");
}

static void say(const Line *line) { proxy_log(2, (u32)line->bytes, line->len); }

/* A mistake in the program, which no test expects. */
static void complain(const char *what, Text where) {
  Line line;
  begin(&line);
  put_text(&line, "PROGRAM ERROR: ");
  put_text(&line, what);
  put_text(&line, ": ");
  put_raw(&line, where);
  say(&line);
}

#endif
