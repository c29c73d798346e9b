"""One model in every mode: no byte is off."""

from functools import partial

import pytest

from benchmarks.memory import offload_bytes
from meshwright.testing.ranks import run_on_threads

CASES = [(store, mode) for store, (_, modes) in offload_bytes.STORES.items() for mode in modes]


@pytest.mark.parametrize(("store", "mode"), CASES)
def test_no_byte_is_off(store: str, mode: str):
    architecture = "GPT2LMHeadModel"
    plan = offload_bytes.plan_of(architecture, store, mode, 2)
    body = partial(offload_bytes.measure_rank, architecture=architecture, plan=plan, store=store, mode=mode)
    for row in run_on_threads(body, plan.mesh):
        assert (row["off"], row["device off"], row["host off"]) == (0, 0, 0), row
        assert all(row["copied"].values())
