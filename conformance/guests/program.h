/* The program: where it comes from, its lines and words, and what words stand for. */
#ifndef PROGRAM_H
#define PROGRAM_H

#include "text.h"

/* ---- the program ---- */

static u8 program[48 * 1024];
static u32 program_len;
static i32 tracing;

/* Takes the string under "program" out of the configuration, a JSON object. */
static void load(Text json) {
  static const char key[] = "\"program\"";
  for (u32 i = 0; i + sizeof key - 1 < json.len; i++) {
    Text here = {json.at + i, sizeof key - 1};
    if (!is(here, key)) continue;
    i += sizeof key - 1;
    while (i < json.len && json.at[i] != '"') i++;
    for (i++; i < json.len && json.at[i] != '"' && program_len < sizeof program; i++) {
      u8 c = json.at[i];
      if (c == '\\' && i + 1 < json.len) {
        c = json.at[++i];
        if (c == 'n') c = '\n';
        else if (c == 't') c = '\t';
        else if (c == 'u' && i + 4 < json.len) {
          /* Programs are ASCII: other bytes are written as \xNN in their strings. */
          c = (u8)(digit(json.at[i + 3]) << 4 | digit(json.at[i + 4]));
          i += 4;
        }
      }
      program[program_len++] = c;
    }
    return;
  }
}

static Text last;   /* bytes that the last call gave */
static Text filled; /* what `fill:N` gave last in this callback */
static i32 last_status;
static i64 variables[26];
static u32 context, root;

static Text line_at(u32 *at) {
  while (*at < program_len && (program[*at] == ' ' || program[*at] == '\t')) (*at)++;
  Text line = {program + *at, 0};
  while (*at < program_len && program[*at] != '\n') (*at)++, line.len++;
  (*at)++;
  while (line.len && line.at[line.len - 1] == ' ') line.len--;
  return line;
}

/* The next word of a line, cut from it; empty at its end. Quotes stay on. */
static Text word(Text *line) {
  while (line->len && *line->at == ' ') line->at++, line->len--;
  Text w = {line->at, 0};
  u8 quote = 0;
  while (w.len < line->len && (quote || w.at[w.len] != ' ')) {
    u8 c = w.at[w.len++];
    if (c == '\\' && quote) w.len++;
    else if (c == '"') quote = !quote;
  }
  if (w.len > line->len) w.len = line->len;
  line->at += w.len;
  line->len -= w.len;
  return w;
}

static const u32 *arguments;
static u32 argument_count;

static i64 number(Text w) {
  if (w.len >= 2 && w.at[0] == '$') {
    Text name = {w.at + 1, w.len - 1};
    if (is(name, "ctx")) return context;
    if (is(name, "root")) return root;
    if (is(name, "status")) return last_status;
    if (is(name, "length")) return last.len;
    u8 c = w.at[1];
    if (w.len == 2 && c >= 'a' && c <= 'z') return variables[c - 'a'];
    if (w.len == 2 && c >= '1' && c <= '9') return (u32)(c - '1') < argument_count ? (i64)arguments[c - '1'] : -1;
    complain("no such variable", w);
    return -1;
  }
  for (u32 i = 0; i < LEN(WORDS); i++)
    if (is(w, WORDS[i].name)) return WORDS[i].value;
  i64 n = 0;
  u32 i = 0, base = 10;
  i32 negative = w.len && w.at[0] == '-';
  if (negative) i++;
  if (w.len > i + 2 && w.at[i] == '0' && w.at[i + 1] == 'x') base = 16, i += 2;
  if (i >= w.len) complain("a number is missing", w);
  for (; i < w.len; i++) {
    i32 d = digit(w.at[i]);
    if (d < 0 || (u32)d >= base) {
      complain("not a number", w);
      return 0;
    }
    n = n * base + d;
  }
  return negative ? -n : n;
}

static u8 *room(u32 size) {
  u8 *at = (u8 *)bump(size);
  if (!at) __builtin_trap();
  return at;
}

/* The bytes a word stands for. */
static Text bytes(Text w, i32 is_path) {
  Text out = {0, 0};
  if (w.len == 0) {
    complain("an argument is missing", w);
    return out;
  }
  if (is(w, "$text")) return last;
  if (w.at[0] == '$') {
    Line line;
    line.len = 0;
    put_number(&line, number(w));
    u8 *copy = room(line.len);
    memcpy(copy, line.bytes, line.len);
    return (Text){copy, line.len};
  }
  static const char fill[] = "fill:";
  Text head = {w.at, sizeof fill - 1};
  if (w.len > head.len && is(head, fill)) {
    Text count = {w.at + head.len, w.len - head.len};
    u32 n = (u32)number(count);
    if (n == 0 || filled.len != n) {
      u8 *copy = room(n);
      memset(copy, 'x', n);
      filled = (Text){copy, n};
    }
    return filled;
  }
  i32 quoted = w.at[0] == '"';
  u8 *copy = room(w.len);
  u32 n = 0;
  for (u32 i = quoted ? 1 : 0; i < w.len; i++) {
    u8 c = w.at[i];
    if (quoted && c == '"') break;
    if (quoted && c == '\\' && i + 1 < w.len) {
      c = w.at[++i];
      if (c == 'n') c = '\n';
      else if (c == 'r') c = '\r';
      else if (c == '0') c = 0;
      else if (c == 'x' && i + 2 < w.len) {
        c = (u8)(digit(w.at[i + 1]) << 4 | digit(w.at[i + 2]));
        i += 2;
      }
    } else if (!quoted && is_path && c == '.') {
      c = 0;
    }
    copy[n++] = c;
  }
  return (Text){copy, n};
}

static void store(u8 *at, u32 n) {
  for (u32 i = 0; i < 4; i++) at[i] = (u8)(n >> (8 * i));
}

static u32 load32(const u8 *at) { return (u32)at[0] | (u32)at[1] << 8 | (u32)at[2] << 16 | (u32)at[3] << 24; }

/* "name=value; name=value" as the ABI's serialized map. */
static Text map(Text w) {
  Text t = bytes(w, 0);
  if (t.len == 0) return t;
  u32 pairs = 1;
  for (u32 i = 0; i < t.len; i++) pairs += t.at[i] == ';';
  u8 *out = room(4 + 8 * pairs + t.len + 2 * pairs);
  store(out, pairs);
  u32 sizes = 4, data = 4 + 8 * pairs, i = 0;
  while (sizes < 4 + 8 * pairs) {
    while (i < t.len && t.at[i] == ' ') i++;
    u32 name = data;
    while (i < t.len && (i == 0 || t.at[i] != '=') && t.at[i] != ';') out[data++] = t.at[i++];
    store(out + sizes, data - name);
    out[data++] = 0;
    if (i < t.len && t.at[i] == '=') i++;
    u32 value = data;
    while (i < t.len && t.at[i] != ';') out[data++] = t.at[i++];
    store(out + sizes + 4, data - value);
    out[data++] = 0;
    i++;
    sizes += 8;
  }
  return (Text){out, data};
}

/* A serialized map as text: "2 pairs: a=b; c=d". */
static void put_map(Line *line, Text t) {
  if (t.len < 4) {
    put_text(line, t.len == 0 || (t.len == 1 && !t.at[0]) ? "0 pairs" : "MALFORMED MAP");
    return;
  }
  u32 pairs = load32(t.at);
  u32 data = 4 + 8 * pairs;
  put_number(line, pairs);
  put_text(line, " pairs");
  for (u32 i = 0; i < pairs; i++) {
    if (4 + 8 * i + 8 > t.len) return put_text(line, " MALFORMED MAP");
    u32 name = load32(t.at + 4 + 8 * i), value = load32(t.at + 8 + 8 * i);
    if (data + name + value + 2 > t.len || t.at[data + name] || t.at[data + name + 1 + value])
      return put_text(line, " MALFORMED MAP");
    put_text(line, i ? "; " : ": ");
    put_raw(line, (Text){t.at + data, name});
    put(line, '=');
    put_bytes(line, (Text){t.at + data + name + 1, value});
    data += name + value + 2;
  }
  if (data != t.len) put_text(line, " MALFORMED MAP");
}

#endif
