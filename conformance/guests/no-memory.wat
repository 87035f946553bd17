;; Keeps its memory to itself.
(module (memory 1) (func (export "proxy_abi_version_0_2_1")))
