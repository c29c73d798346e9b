"""The garbage collector rests inside, and afterwards does what it did before."""

import gc

import pytest

from meshwright.model.tensors.garbage_collection import pause_garbage_collection


def test_it_is_off_inside_and_on_after_an_error():
    @pause_garbage_collection()
    def fail() -> None:
        assert not gc.isenabled()
        raise ValueError("here")

    with pytest.raises(ValueError, match="here"):
        fail()
    assert gc.isenabled()


def test_one_that_was_off_stays_off():
    gc.disable()
    try:
        with pause_garbage_collection(), pause_garbage_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
