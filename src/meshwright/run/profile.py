"""device.toml: what `meshwright bench device` found out about a device, written for people and read by the planner.

    version, date, kind, device, torch, threads, ranks, memory      what was measured, when and how
    call_s, call_backward_s                                         seconds that an operation takes at least
    products, attention, moved, computed, stretches                 core/profile.py says what their figures are

Every fault of a file is reported at once.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from meshwright.core.profile import Profile
from meshwright.run.figures import fitted, parsed, write_lines

HEAD = """\
# What a device does per second, measured by `meshwright bench device`. Plans are priced by it: --hardware device.toml. Measure
# again when the device, torch or the number of threads change.
"""
LISTS = {
    "products": "matrix products, [m, k] by [k, n] so many at once: FLOP/s, and the distance of the quartiles as a share",
    "attention": "fused attention without a mask: seconds, backward alone",
    "moved": "operations that only read and write: bytes of both together, bytes/s",
    "computed": "operations that compute much for each number: seconds of one",
    "stretches": "work of so many seconds: how far the later of two is behind their mean, as a share",
}


def read_profile(path: Path) -> Profile:
    """The profile in the file at `path`. Raises PlanError with every fault of it."""
    return fitted(parsed(path, "measure the device first: meshwright bench device --out device.toml"), Profile, path)


def write_profile(profile: Profile, path: Path) -> Profile:
    """Write `profile` to `path`; returns it as a reader gets it, with figures of four digits.

    Raises PlanError when the file cannot be written.
    """
    write_lines(path, [HEAD, *_lines(profile)])
    return read_profile(path)


def _lines(profile: Profile) -> Iterator[str]:
    for key, value in vars(profile).items():
        if key not in LISTS and not key.startswith("_"):
            yield f"{key} = {_said(value)}"
    for key, words in LISTS.items():
        yield f"\n# {words}\n{key} = ["
        yield from _tables(vars(profile)[key])
        yield "]"


def _tables(rows: Iterable[object]) -> Iterator[str]:
    for row in rows:
        yield f"    {{{', '.join(f'{key} = {_said(value)}' for key, value in vars(row).items())}}},"


def _said(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else json.dumps(value, ensure_ascii=False)
