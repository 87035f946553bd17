;; Calls itself without end while it is configured. Its functions have names.
(module $recursion
  (memory (export "memory") 1)
  (func $descend (param $depth i32) (result i32)
    (i32.add (call $descend (i32.add (local.get $depth) (i32.const 1))) (i32.const 1)))
  (func (export "proxy_abi_version_0_2_1"))
  (func $configure (export "proxy_on_configure") (param i32 i32) (result i32) (call $descend (i32.const 0))))
