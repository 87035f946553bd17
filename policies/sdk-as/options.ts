// The plugin's config table.

import { isInteger } from "./turn";

/** The members of a JSON object. */
export class Members {
  names: string[] = [];
  json: string[] = [];

  /** Splits the object. The gateway writes the JSON, so it is sound. */
  constructor(text: string) {
    let at = skipSpace(text, 0);
    while (at < text.length && (text.charAt(at) == "{" || text.charAt(at) == ",")) {
      at = skipSpace(text, at + 1);
      const nameEnd = skipValue(text, at);
      const name = unquote(text.substring(at, nameEnd));
      at = skipSpace(text, nameEnd);
      if (name === null || at >= text.length || text.charAt(at) != ":") break;
      at = skipSpace(text, at + 1);
      const end = skipValue(text, at);
      this.names.push(name);
      this.json.push(text.substring(at, end));
      at = skipSpace(text, end);
    }
  }

  /** A text; empty if there is none of this name. */
  text(name: string): string {
    const at = this.names.indexOf(name);
    if (at < 0) return "";
    const text = unquote(this.json[at]);
    return text === null ? "" : text;
  }

  /** An integer. */
  integer(name: string, otherwise: i64): i64 {
    const at = this.names.indexOf(name);
    return at < 0 || !isInteger(this.json[at]) ? otherwise : I64.parseInt(this.json[at]);
  }
}

/** Integers, booleans and texts. An option that the policy does not ask for is unknown, and the plugin is refused. */
export class Options {
  private members: Members;
  private known: bool[] = [];
  /** The first thing that is wrong; empty if nothing is. */
  wrong: string = "";

  /** Of a JSON object. */
  constructor(text: string) {
    const members = new Members(text);
    this.members = members;
    this.known = new Array<bool>(members.names.length);
  }

  /** An integer from `least` to `most`. */
  integer(name: string, otherwise: i64, least: i64, most: i64): i64 {
    const json = this.find(name);
    if (json === null) return otherwise;
    if (!isInteger(json)) {
      this.fail(name, "must be an integer");
      return otherwise;
    }
    const value = I64.parseInt(json);
    if (value < least || value > most) this.fail(name, "must be " + least.toString() + " to " + most.toString());
    return value;
  }

  /** True or false. */
  flag(name: string, otherwise: bool): bool {
    const json = this.find(name);
    if (json === null) return otherwise;
    if (json != "true" && json != "false") this.fail(name, "must be true or false");
    return json == "true";
  }

  /** A text. */
  text(name: string, otherwise: string): string {
    const json = this.find(name);
    if (json === null) return otherwise;
    const text = unquote(json);
    if (text === null) {
      this.fail(name, "must be a text");
      return otherwise;
    }
    return text;
  }

  /** Says that an option is wrong, for rules of the policy's own. */
  fail(name: string, what: string): void {
    if (this.wrong.length == 0) this.wrong = "option `" + name + "`: " + what;
  }

  /** Whether all that was given is known and right. */
  accepted(): bool {
    for (let i = 0; i < this.known.length; i++) {
      if (!this.known[i]) this.fail(this.members.names[i], "unknown");
    }
    return this.wrong.length == 0;
  }

  private find(name: string): string | null {
    const at = this.members.names.indexOf(name);
    if (at < 0) return null;
    this.known[at] = true;
    return this.members.json[at];
  }
}

function isSpace(code: i32): bool {
  return code == 32 || code == 10 || code == 9 || code == 13;
}

function skipSpace(text: string, at: i32): i32 {
  while (at < text.length && isSpace(text.charCodeAt(at))) at++;
  return at;
}

/** The end of the value that begins at `at`. */
function skipValue(text: string, at: i32): i32 {
  let depth = 0;
  for (; at < text.length; at++) {
    const c = text.charAt(at);
    if (c == '"') {
      for (at++; at < text.length && text.charAt(at) != '"'; at++) {
        if (text.charAt(at) == "\\") at++;
      }
      if (depth == 0) return min(at + 1, text.length);
    } else if (c == "{" || c == "[") {
      depth++;
    } else if (c == "}" || c == "]") {
      if (depth == 0) return at;
      if (--depth == 0) return at + 1;
    } else if (depth == 0 && (c == "," || c == ":" || isSpace(text.charCodeAt(at)))) {
      return at;
    }
  }
  return min(at, text.length);
}

/** Reads a JSON text; null if it is none. */
function unquote(json: string): string | null {
  if (json.length < 2 || json.charAt(0) != '"' || json.charAt(json.length - 1) != '"') return null;
  let text = "";
  for (let i = 1; i < json.length - 1; i++) {
    let c = json.charAt(i);
    if (c == "\\") {
      c = json.charAt(++i);
      if (c == "n") c = "\n";
      else if (c == "t") c = "\t";
      else if (c == "r") c = "\r";
      else if (c == "b") c = "\b";
      else if (c == "f") c = "\f";
      else if (c == "u") {
        if (i + 4 >= json.length) return null;
        c = String.fromCharCode(<i32>I64.parseInt(json.substring(i + 1, i + 5), 16));
        i += 4;
      }
    }
    text += c;
  }
  return text;
}
