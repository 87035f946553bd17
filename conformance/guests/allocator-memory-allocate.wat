;; Hands out memory by `proxy_on_memory_allocate`, and logs the path of each request.
(module
  (import "env" "proxy_log" (func $log (param i32 i32 i32) (result i32)))
  (import "env" "proxy_get_header_map_value" (func $get (param i32 i32 i32 i32 i32) (result i32)))
  (memory (export "memory") 2)
  (data (i32.const 16) ":path")
  (func (export "proxy_abi_version_0_2_1"))
  ;; Two bytes before what is handed out there is room for the mark of the kit's lines.
  (data (i32.const 65536) "> ")
  (func (export "proxy_on_memory_allocate") (param i32) (result i32) (i32.const 65538))
  (func (export "proxy_on_request_headers") (param i32 i32 i32) (result i32)
    (drop (call $get (i32.const 0) (i32.const 16) (i32.const 5) (i32.const 32) (i32.const 36)))
    (drop (call $log (i32.const 2) (i32.const 65536) (i32.add (i32.const 2) (i32.load (i32.const 36)))))
    (i32.const 0)))
