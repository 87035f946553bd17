// The functions that the gateway calls. The entry file hands them on: export * from "../turnstile/exports".

import { allocate } from "./abi";
import { onConfigure, onDecide, onEvent, onFinished } from "./policy";

export function proxy_abi_version_0_2_1(): void {}

export function proxy_on_memory_allocate(size: usize): usize {
  return allocate(size);
}

export function proxy_on_context_create(_context: u32, _parent: u32): void {}

export function proxy_on_vm_start(_root: u32, _size: u32): u32 {
  return 1;
}

export function proxy_on_configure(_root: u32, size: u32): u32 {
  return onConfigure(size) ? 1 : 0;
}

export function proxy_on_request_headers(_context: u32, _count: u32, _end: u32): u32 {
  onDecide();
  return 0;
}

export function proxy_on_foreign_function(_context: u32, id: u32, size: u32): void {
  onEvent(id, size);
}

export function proxy_on_log(_context: u32): void {
  onFinished();
}
