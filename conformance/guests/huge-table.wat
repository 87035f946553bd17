;; Asks for a table of a thousand million elements.
(module (memory (export "memory") 1) (table 1000000000 funcref) (func (export "proxy_abi_version_0_2_1")))
