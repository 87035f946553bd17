;; A module of an ABI version that nobody knows.
(module (memory (export "memory") 1) (func (export "proxy_abi_version_9_9_9")))
