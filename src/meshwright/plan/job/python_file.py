"""Imports the Python files that a config names: file.py:name.

A file is a module under a private name, of its role and of digests of its path and contents, with its folder
on the import path, as when it is run. Two roles of one file are two modules.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

PREFIX, DIGEST_NBYTES = "_meshwright_file_", 8


def module_name(path: Path, role: str) -> str:
    """Returns the name of the module that the file at `path` is in `role`; of other contents another one."""
    digests = (blake2b(each, digest_size=DIGEST_NBYTES) for each in (_bytes(path), path.read_bytes()))
    return "_".join((PREFIX + role, *(each.hexdigest() for each in digests)))


def import_file(path: Path, role: str) -> ModuleType:
    """Returns the module in the file at `path`, run anew; raises what the file raises."""
    name = module_name(path, role)
    spec = spec_from_file_location(name, path.absolute())
    if spec is None or spec.loader is None:  # of a name that does not end in .py
        raise ImportError(f"{path} is no Python file")
    module = module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up the module that they are defined in
    try:
        with folder_on_path(path):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


@contextmanager
def folder_on_path(path: Path) -> Iterator[None]:
    """The folder of `path` is the first of the import path, so that a file finds its neighbours."""
    folder = str(path.resolve().parent)
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)


def source_of(kind: type) -> str:
    """Returns file.py:Class of a class in a file that `import_file` has imported; "" of any other."""
    if not kind.__module__.startswith(PREFIX):
        return ""
    return f"{sys.modules[kind.__module__].__file__}:{kind.__name__}"


def source_digest(kind: type) -> str:
    """Returns 16 hex digits of the contents of that file; "" likewise."""
    return kind.__module__.rpartition("_")[2] if kind.__module__.startswith(PREFIX) else ""


def _bytes(path: Path) -> bytes:
    return str(path.resolve()).encode()
