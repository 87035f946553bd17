;; Exports a callback by another type than the ABI gives it.
(module
  (memory (export "memory") 1)
  (func (export "proxy_abi_version_0_2_1"))
  (func (export "proxy_on_request_body") (param i32 f64 i32) (result i64) (i64.const 0)))
