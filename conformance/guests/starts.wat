;; Logs which of its start functions run.
(module
  (import "env" "proxy_log" (func $log (param i32 i32 i32) (result i32)))
  (memory (export "memory") 1)
  (data (i32.const 16) "> initialize> start> main")
  (func (export "proxy_abi_version_0_2_1"))
  (func (export "proxy_on_memory_allocate") (param i32) (result i32) (i32.const 4096))
  (func (export "_initialize") (drop (call $log (i32.const 2) (i32.const 16) (i32.const 12))))
  (func (export "_start") (drop (call $log (i32.const 2) (i32.const 28) (i32.const 7))))
  (func (export "main") (param i32 i32) (result i32)
    (drop (call $log (i32.const 2) (i32.const 35) (i32.const 6)))
    (i32.const 0)))
