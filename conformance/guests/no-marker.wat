;; A module that says nothing of an ABI version.
(module (memory (export "memory") 1))
