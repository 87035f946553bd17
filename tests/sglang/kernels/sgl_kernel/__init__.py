"""Stands in for SGLang's compiled kernel package, so that the server starts on a machine without it.

With `--device cpu --attention-backend torch_native --sampling-backend pytorch` no kernel is called: SGLang only imports
the names. So every attribute is a function that raises when it is called, submodules appear when they are imported, and
`scalar_types` answers any name with an object that only has that name.
"""

import importlib.machinery
import sys
import types

__version__ = "0.4.10"  # SGLang compares it with a minimum when it starts


class _Named:
    def __init__(self, name):
        self.name = name

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Named(f"{self.name}.{name}")

    def __repr__(self):
        return self.name


def _missing(module, name):
    def call(*_args, **_kwargs):
        raise NotImplementedError(f"{module}.{name} was called, but the compiled kernels are not installed")

    call.__name__ = name
    return call


class _Module(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Named(name) if name == "scalar_types" else _missing(self.__name__, name)


class _Finder:
    """Makes any submodule of this package."""

    def find_spec(self, fullname, _path=None, _target=None):
        if fullname.startswith(f"{__name__}."):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec):
        module = _Module(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module):
        pass


sys.meta_path.append(_Finder())
scalar_types = _Named("scalar_types")


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return _missing(__name__, name)
