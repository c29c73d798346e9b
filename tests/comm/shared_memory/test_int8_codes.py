"""Codes of one byte in C; tests/parallel/compression/codecs/test_int8.py: they have the bits of torch."""

import pytest
import torch

from meshwright.comm.shared_memory import int8_codes


def test_only_float32_of_a_cpu_is_coded_in_c():
    assert not int8_codes.can_code(torch.ones(3, dtype=torch.float64))
    assert not int8_codes.can_code(torch.ones(3, device="meta"))


@pytest.mark.skipif(not int8_codes.can_code(torch.ones(1)), reason="there is no C compiler")
def test_what_codes_say_and_what_they_lose_are_the_value():
    values = torch.randn(600)
    lost, found = values.clone(), torch.ones(600)
    codes = torch.empty(3 * 4 + 600, dtype=torch.uint8)
    int8_codes.encode(lost, codes[:12], codes[12:])
    int8_codes.decode(codes[:12], codes[12:], found, add=True)
    torch.testing.assert_close(found - 1 + lost, values, rtol=0, atol=1e-6)
    assert lost.abs().max() <= values.abs().max() / 127 / 2 * 1.001
