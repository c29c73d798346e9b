"""Small programs with streams have races exactly where an order is missing."""

import json

import pytest

from benchmarks.harness.fake_cuda import run_with_fake_cuda, why_no_fake_cuda


@pytest.mark.skipif(why_no_fake_cuda() != "", reason=why_no_fake_cuda())
def test_races_are_found_where_an_order_is_missing():
    found = json.loads(run_with_fake_cuda(["-m", "tests.benchmarks.races.stream_examples"]))
    # what is wrong with an example is written in capitals
    assert found == {name: int(any(word.isupper() for word in name.split())) for name in found}
    assert len(found) == 20
