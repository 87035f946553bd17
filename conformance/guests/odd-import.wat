;; Imports a call by another type than the ABI gives it.
(module
  (import "env" "proxy_log" (func (param i32 i64) (result i32)))
  (memory (export "memory") 1)
  (func (export "proxy_abi_version_0_2_1")))
