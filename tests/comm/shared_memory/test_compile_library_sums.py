"""Half-precision conversions of sums.h against torch's, with the compiler's own type and without it."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from meshwright.comm.shared_memory import compile_library

EXPORTED = """
#include "sums.h"
void widen(const half *in, float *out, int n) { for (int i = 0; i < n; i++) out[i] = from_half(in[i]); }
void narrow(const float *in, half *out, int n) { for (int i = 0; i < n; i++) out[i] = to_half(in[i]); }
void narrow_bf16(const float *in, uint16_t *out, int n) {
    for (int i = 0; i < n; i++) out[i] = to_bf16(in[i]);
}
void copy(char *to, const char *from, size_t n) { stream(to, from, n); }
"""


@pytest.fixture(params=["", "-U__FLT16_MANT_DIG__"], ids=["own type", "in software"])
def compiled(request: pytest.FixtureRequest, tmp_path: Path) -> ctypes.CDLL:
    compiler = next(filter(None, map(shutil.which, compile_library.COMPILERS)), None)
    if compiler is None:
        pytest.skip("there is no C compiler")
    (tmp_path / "exported.c").write_text(EXPORTED)
    here = Path(compile_library.__file__).parent
    words = [
        compiler,
        *compile_library.FLAGS,
        *filter(None, [request.param]),
        f"-I{here}",
        "-o",
        tmp_path / "x.so",
        tmp_path / "exported.c",
    ]
    subprocess.run(words, check=True)
    return ctypes.CDLL(str(tmp_path / "x.so"))


def called(function: ctypes._CFuncPtr, given: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    out = torch.empty(given.shape, dtype=dtype)
    function(ctypes.c_void_p(given.data_ptr()), ctypes.c_void_p(out.data_ptr()), ctypes.c_int(given.numel()))
    return out


def floats() -> torch.Tensor:
    """Bit patterns of all exponents, halves exactly between two neighbours, and the ends of the ranges."""
    patterns = torch.arange(-(2**31), 2**31, 1021 * 16, dtype=torch.int64).to(torch.int32).view(torch.float32)
    halves = torch.arange(0, 0x7C00, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
    between = torch.cat(
        [
            halves[:-1] + (halves[1:] - halves[:-1]) / 2,
            halves,
            torch.tensor([65519.0, 65520.0, 65536.0, 2.0**-25]),
        ]
    )
    return torch.cat([patterns, between, -between]).contiguous()


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal bits; one NaN is as good as another."""
    nan = one.isnan() & other.isnan()
    whole = {2: torch.int16, 4: torch.int32}[one.element_size()]
    return bool((nan | (one.view(whole) == other.view(whole))).all())


def test_every_half_becomes_the_float_that_torch_makes_of_it(compiled: ctypes.CDLL) -> None:
    halves = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    assert same(called(compiled.widen, halves, torch.float32), halves.float())


def test_floats_are_rounded_to_half_types_as_torch_rounds_them(compiled: ctypes.CDLL) -> None:
    given = floats()
    assert same(called(compiled.narrow, given, torch.float16), given.half())
    assert same(called(compiled.narrow_bf16, given, torch.bfloat16), given.bfloat16())


def test_a_copy_past_the_cache_copies_every_byte_wherever_it_begins(compiled: ctypes.CDLL) -> None:
    source = torch.arange(0, 1000, dtype=torch.int32).to(torch.uint8)
    for begin in (0, 1, 63, 64):
        for nbytes in (0, 1, 255, 256, 257, 700):
            target = torch.zeros(900, dtype=torch.uint8)
            at = ctypes.c_void_p(target.data_ptr() + begin)
            compiled.copy(at, ctypes.c_void_p(source.data_ptr() + 3), ctypes.c_size_t(nbytes))
            right = torch.zeros(900, dtype=torch.uint8)
            right[begin : begin + nbytes] = source[3 : 3 + nbytes]
            assert torch.equal(target, right)
