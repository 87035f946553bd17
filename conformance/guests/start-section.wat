;; Calls the host before it is instantiated, as AssemblyScript's top-level code does, and imports the older WASI.
(module
  (import "env" "proxy_log" (func $log (param i32 i32 i32) (result i32)))
  (import "wasi_unstable" "proc_exit" (func (param i32)))
  (import "env" "abort" (func (param i32 i32 i32 i32)))
  (memory (export "memory") 1)
  (data (i32.const 16) "> start section> configured")
  (func $begin (drop (call $log (i32.const 2) (i32.const 16) (i32.const 15))))
  (start $begin)
  (func (export "proxy_abi_version_0_2_0"))
  (func (export "proxy_on_memory_allocate") (param i32) (result i32) (i32.const 4096))
  (func (export "proxy_on_configure") (param i32 i32) (result i32)
    (drop (call $log (i32.const 2) (i32.const 31) (i32.const 12)))
    (i32.const 1)))
