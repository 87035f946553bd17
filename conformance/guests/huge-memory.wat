;; Asks for 4 GiB of memory before it has begun.
(module (memory (export "memory") 65536) (func (export "proxy_abi_version_0_2_1")))
