"""Compiles the C part on first use, and caches it for later processes of this user.

It is compiled for the processor it runs on, so the file is named by a hash of the source, the compiler and
the processor's features. It is stored in a folder that only this user can write to: whoever can write there
can run code as this user.
"""

import ctypes
import fcntl
import functools
import os
import pwd
import shutil
import stat
import subprocess
import sys
import tempfile
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

SOURCE_FOLDER = Path(__file__).parent
SOURCE_FILES = ("memory.c", "chunks.h", "sums.h", "codes.h", "marked.h", "counter.h")
COMPILERS = ("cc", "gcc", "clang")
# without fused products: codes have the same bits on every processor, and as torch computes them
FLAGS = ("-std=gnu11", "-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-shared", "-fPIC")
COMPILE_TIMEOUT_S = 120.0

POINTER, UINT64, UINT32, INT64 = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_int64
SIGNATURES = {  # memory.c: what goes in, what comes out
    "shared_bytes": ((ctypes.c_int,), ctypes.c_size_t),
    "shared_map": ((ctypes.c_int, ctypes.c_int, ctypes.c_int, INT64), POINTER),
    "shared_unmap": ((POINTER,), None),
    "shared_post": ((POINTER, UINT64, UINT32, UINT32, UINT32, POINTER, POINTER, UINT64), ctypes.c_int),
    "shared_finish": ((POINTER, UINT64, INT64), ctypes.c_int),
    "shared_wait_place": ((POINTER, UINT64, INT64), ctypes.c_int),
    "shared_agree": ((POINTER, UINT64), ctypes.c_int),
    "shared_posted": ((POINTER, UINT64, ctypes.c_int, ctypes.POINTER(UINT64)), ctypes.c_int),
    "shared_awaits": ((POINTER, UINT64, ctypes.c_int, ctypes.c_int), ctypes.c_int),
    "shared_has_left": ((POINTER, ctypes.c_int), ctypes.c_int),
    "shared_leave": ((POINTER,), None),
    "int8_encode": ((POINTER, UINT64, POINTER, POINTER), None),
    "int8_decode": ((POINTER, POINTER, UINT64, POINTER, ctypes.c_int), None),
    "mark_elements": ((POINTER, UINT64, ctypes.c_int, UINT64, POINTER), UINT64),
    "take_marked": ((POINTER, POINTER, UINT64, ctypes.c_int, POINTER), None),
    "put_marked": ((POINTER, UINT64, POINTER, UINT64, ctypes.c_int, POINTER), None),
}


class SharedMemoryUnavailable(Exception):
    """The reason why this process cannot share memory, as a text for the log."""


@functools.cache
def load_library() -> ctypes.CDLL:
    """Returns the compiled library; compiles it if no earlier process has.

    Raises SharedMemoryUnavailable without Linux, a compiler or a cache folder, or when it cannot be loaded.
    """
    if sys.platform != "linux":
        raise SharedMemoryUnavailable(f"it needs Linux, and this is {sys.platform}")
    path = _compile(_cache_folder())
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise SharedMemoryUnavailable(f"{path} cannot be loaded ({error})") from error
    for name, (given, returned) in SIGNATURES.items():
        function = getattr(library, name)  # kept by the library; library[name] is new each time
        function.argtypes, function.restype = given, returned
    return library


@functools.cache
def has_library() -> bool:
    """Returns whether there is a library that can be loaded."""
    try:
        load_library()
    except SharedMemoryUnavailable:
        return False
    return True


@functools.cache
def source_bytes() -> bytes:
    """Returns the C source."""
    return b"".join((SOURCE_FOLDER / name).read_bytes() for name in SOURCE_FILES)


def _compile(folder: Path) -> Path:
    compiler = next((found for name in COMPILERS if (found := shutil.which(name))), None)
    if compiler is None:
        raise SharedMemoryUnavailable(
            f"there is no C compiler (looked for {', '.join(COMPILERS)}); install one, such as gcc"
        )
    found = Path(compiler).resolve()
    # asking the compiler for its version would start a process on every rank
    version = f"{found} {found.stat().st_size} {found.stat().st_mtime_ns}"
    key = sha256("\n".join((version, _cpu_features(), *FLAGS)).encode() + source_bytes()).hexdigest()[:32]
    path = folder / f"shared-{key}.so"
    try:
        with (folder / "compiling").open("wb") as held:
            fcntl.flock(held, fcntl.LOCK_EX)  # ranks start together: one compiles, the others find it done
            if not path.exists():
                part = folder / f".{path.name}.{os.getpid()}.part"
                _run(compiler, *FLAGS, "-o", str(part), str(SOURCE_FOLDER / SOURCE_FILES[0]))
                part.replace(path)
        if path.stat().st_uid != os.getuid():
            raise SharedMemoryUnavailable(f"{path} belongs to another user; remove it")
    except OSError as error:
        raise SharedMemoryUnavailable(f"nothing can be written to {folder} ({error.strerror})") from error
    return path


def _run(*command: str) -> None:
    try:
        subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=COMPILE_TIMEOUT_S, check=True
        )
    except subprocess.CalledProcessError as error:
        lines = (error.stderr or error.stdout).strip().splitlines() or ["no output"]
        raise SharedMemoryUnavailable(f"{command[0]} failed: {lines[0]}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SharedMemoryUnavailable(f"{command[0]} did not run ({error})") from error


def _cpu_features() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _cache_folder() -> Path:
    """A folder of this user's own: in the home folder, or in the one for temporary files.

    Raises SharedMemoryUnavailable.
    """
    user = os.getuid()
    places = [Path(tempfile.gettempdir()) / f"meshwright-native-{user}"]
    with suppress(KeyError):  # a container may run a user that nobody has named
        places.insert(0, Path(pwd.getpwuid(user).pw_dir) / ".cache" / "meshwright" / "native")
    for place in places:
        try:
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError:
            continue
        found = place.lstat()
        private = stat.S_ISDIR(found.st_mode) and found.st_uid == user and not found.st_mode & 0o077
        if private and os.access(place, os.W_OK):
            return place
    shown = " or ".join(map(str, places))
    raise SharedMemoryUnavailable(
        f"there is no private folder at {shown}; needed is one that only this user can read and write"
    )
