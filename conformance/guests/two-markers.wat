;; A module that cannot decide.
(module (memory (export "memory") 1) (func (export "proxy_abi_version_0_2_0")) (func (export "proxy_abi_version_0_2_1")))
