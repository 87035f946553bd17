;; Imports what no host has.
(module
  (import "env" "proxy_no_such_call" (func (param i32) (result i32)))
  (memory (export "memory") 1)
  (func (export "proxy_abi_version_0_2_1")))
