// The host's functions, and the memory that goes over the border.
//
// SPDX-License-Identifier: Apache-2.0

// @ts-ignore: decorator
@external("env", "proxy_log")
declare function proxy_log(level: u32, at: usize, len: usize): i32;
// @ts-ignore: decorator
@external("env", "proxy_get_property")
declare function proxy_get_property(path: usize, len: usize, value: usize, valueLen: usize): i32;
// @ts-ignore: decorator
@external("env", "proxy_set_property")
declare function proxy_set_property(path: usize, len: usize, value: usize, valueLen: usize): i32;
// @ts-ignore: decorator
@external("env", "proxy_get_header_map_value")
declare function proxy_get_header_map_value(map: u32, name: usize, len: usize, value: usize, valueLen: usize): i32;
// @ts-ignore: decorator
@external("env", "proxy_get_buffer_bytes")
declare function proxy_get_buffer_bytes(buffer: u32, start: u32, max: u32, value: usize, valueLen: usize): i32;
// @ts-ignore: decorator
@external("env", "proxy_call_foreign_function")
declare function proxy_call_foreign_function(name: usize, len: usize, arguments: usize, argumentsLen: usize, result: usize, resultLen: usize): i32;
// @ts-ignore: decorator
@external("env", "proxy_define_metric")
declare function proxy_define_metric(kind: u32, name: usize, len: usize, id: usize): i32;
// @ts-ignore: decorator
@external("env", "proxy_increment_metric")
declare function proxy_increment_metric(id: u32, by: i64): i32;

const REQUEST_HEADERS: u32 = 0;
const PLUGIN_CONFIGURATION: u32 = 7;
const CALL_DATA: u32 = 8;
const COUNTER: u32 = 0;

/** Where the host puts the address and the length of what it hands over. */
const ANSWER: usize = memory.data(8);

/** Memory for the host to write to: outside of the garbage collector's until it is taken over. */
export function allocate(size: usize): usize {
  return heap.alloc(size);
}

/** Takes over what the host wrote. */
function take(): ArrayBuffer {
  const at = load<usize>(ANSWER);
  const len = <i32>load<usize>(ANSWER, 4);
  const bytes = new ArrayBuffer(len);
  if (len > 0) {
    memory.copy(changetype<usize>(bytes), at, len);
    heap.free(at);
  }
  return bytes;
}

function clear(): void {
  store<u64>(ANSWER, 0);
}

/** A property by its dotted path, or null. */
export function getProperty(path: string): ArrayBuffer | null {
  const name = String.UTF8.encode(path);
  clear();
  const status = proxy_get_property(changetype<usize>(name), name.byteLength, ANSWER, ANSWER + 4);
  return status == 0 ? take() : null;
}

/** Writes a property. */
export function setProperty(path: string, value: ArrayBuffer): void {
  const name = String.UTF8.encode(path);
  proxy_set_property(changetype<usize>(name), name.byteLength, changetype<usize>(value), value.byteLength);
}

/** A request header, or null. */
export function getHeader(header: string): ArrayBuffer | null {
  const name = String.UTF8.encode(header);
  clear();
  const status = proxy_get_header_map_value(REQUEST_HEADERS, changetype<usize>(name), name.byteLength, ANSWER, ANSWER + 4);
  return status == 0 ? take() : null;
}

function getBuffer(kind: u32, size: u32): ArrayBuffer {
  clear();
  const status = size == 0 ? 1 : proxy_get_buffer_bytes(kind, 0, size, ANSWER, ANSWER + 4);
  return status == 0 ? take() : new ArrayBuffer(0);
}

/** The plugin's configuration. */
export function getConfiguration(size: u32): ArrayBuffer {
  return getBuffer(PLUGIN_CONFIGURATION, size);
}

/** What the gateway calls a function of the plugin with. */
export function getCallData(size: u32): ArrayBuffer {
  return getBuffer(CALL_DATA, size);
}

/** Calls a function of the gateway; null where it has none of that name, or refuses. */
export function callFunction(name: string, values: ArrayBuffer): ArrayBuffer | null {
  const text = String.UTF8.encode(name);
  clear();
  const status = proxy_call_foreign_function(
    changetype<usize>(text), text.byteLength, changetype<usize>(values), values.byteLength, ANSWER, ANSWER + 4);
  return status == 0 ? take() : null;
}

/** Writes a log line. */
export function log(level: u32, line: string): void {
  const text = String.UTF8.encode(line);
  proxy_log(level, changetype<usize>(text), text.byteLength);
}

/** Defines a counter, or finds it again; 0 counts nothing. */
export function defineCounter(name: string): u32 {
  const text = String.UTF8.encode(name);
  clear();
  const status = proxy_define_metric(COUNTER, changetype<usize>(text), text.byteLength, ANSWER);
  return status == 0 ? load<u32>(ANSWER) : 0;
}

/** Adds to a counter. */
export function count(counter: u32, by: i64): void {
  if (counter != 0) proxy_increment_metric(counter, by);
}

/** What asc calls where a program ends itself: the text goes to the gateway's log, the instance ends. */
export function onAbort(message: string | null, file: string | null, line: u32, column: u32): void {
  const where = file ? file : "?";
  log(5, (message ? message : "abort") + " at " + where + ":" + line.toString() + ":" + column.toString());
  unreachable();
}
