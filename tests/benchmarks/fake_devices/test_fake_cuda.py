"""Plans on fake CUDA tensors: counts of what they ask of the device, beside the stored ones."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from benchmarks.fake_devices import fake_cuda
from benchmarks.fake_devices.combinations import combinations
from benchmarks.harness.cuda_guard import why_no_fake_cuda
from benchmarks.harness.result import stored

BEFORE = {"a, rank 0": "first step 9/2/3/4, step 8/2/3/4", "b, rank 0": "step 8/2/3/4"}
HIGHER = {"a, rank 0": "first step 9/2/3/4, step 8/3/3/4", "b, rank 0": "step 7/2/3/4"}
RAISED = {"a, rank 0": "Traceback:\n  there\n", "b, rank 0": "step 8/2/3/4"}
SAMPLES = {  # of each group of combinations, those that are run
    "small": ("ddp, float32", "zero 3, bfloat16 autocast"),
    "data parallel": ("ddp, noise scale, bfloat16 autocast", "hsdp 3, float16, loss scale", "zero 3, muon"),
    "pipelines": ("pipeline zb_v, bfloat16 autocast", "pipedream, float32", "pipeline 1f1b, adamw_8bit"),
    "tensor parallel": ("tp, sequence, float32", "tp 2.5d, bfloat16 autocast", "tp 3d, bfloat16, master"),
    "context parallel": ("ring, zigzag, bfloat16 autocast", "ulysses, dropout, float32"),
    "memory": ("tiled mlp, bfloat16 autocast", "zero 3, checkpointing, dropout, float32"),
    "together": ("pipeline, ring, tp, zero 1, bfloat16 autocast",),
    "families": ("t5, float32", "whisper, pp 2, bfloat16 autocast", "mixtral, dp_shard 3, bfloat16 autocast"),
}
RENEW = "after a change that is meant: python -m benchmarks.fake_devices.fake_cuda (--higher)"


@pytest.fixture
def counts_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(fake_cuda, "COUNTS", tmp_path / "counts.json")
    return tmp_path / "counts.json"


@pytest.mark.skipif(why_no_fake_cuda() != "", reason=why_no_fake_cuda())
@pytest.mark.parametrize("names", SAMPLES.values(), ids=SAMPLES)
def test_a_rank_asks_no_more_of_the_device_than_is_stored_and_what_it_asks_less_is_renewed(
    names: tuple[str, ...],
):
    found = fake_cuda.count_in_subprocesses(names)
    assert {rank.rpartition(", rank ")[0] for rank in found} == set(names)
    assert [str(each) for each in fake_cuda.differences(found, fake_cuda.stored_counts())] == [], RENEW


def test_every_combination_is_stored_and_passes():
    ranks = {f"{name}, rank {rank}" for name, each in combinations().items() for rank in each.ranks}
    assert fake_cuda.stored_counts().keys() == ranks, RENEW
    assert stored("fake_cuda")["median"] == len(combinations()) >= fake_cuda.LEAST


@pytest.mark.parametrize(
    ("found", "texts"),
    [
        (BEFORE, []),
        (
            HIGHER,
            [
                "a, rank 0: 3 host reads of step, and 2 are stored",
                "b, rank 0: 7 kernels of step, and 8 are stored",
            ],
        ),
        (RAISED, ["a, rank 0: Traceback:\n  there\n"]),
        ({"c, rank 0": "step 1/1/1/1"}, ["c, rank 0: nothing is stored"]),
    ],
)
def test_each_difference_from_the_stored_counts_is_named(found: Mapping[str, str], texts: list[str]):
    assert [str(each) for each in fake_cuda.differences(found, BEFORE)] == texts


def test_a_higher_count_is_stored_on_request_only_and_a_rank_that_raised_never(counts_file: Path):
    assert fake_cuda.renew(BEFORE, drop_others=True, higher=False) == []
    assert [each.rank for each in fake_cuda.renew(HIGHER, drop_others=False, higher=False)] == ["a, rank 0"]
    assert fake_cuda.stored_counts() == {**BEFORE, "b, rank 0": HIGHER["b, rank 0"]}
    assert fake_cuda.renew(HIGHER, drop_others=False, higher=True) == []
    assert fake_cuda.stored_counts() == HIGHER
    assert [each.rank for each in fake_cuda.renew(RAISED, drop_others=False, higher=True)] == ["a, rank 0"]
    assert fake_cuda.stored_counts()["a, rank 0"] == HIGHER["a, rank 0"]


@pytest.mark.parametrize(("found", "passed"), [(BEFORE, 2), (HIGHER, 1), (RAISED, 1)])
def test_the_result_counts_combinations_without_a_higher_count(found: Mapping[str, str], passed: int):
    result = fake_cuda.result(found, BEFORE)
    assert result.median == passed
    assert result.holds is False, "two combinations are too few"
