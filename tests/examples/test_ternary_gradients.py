"""The example codec, one file outside of the library: its error, its bytes, its sums under any sharding."""

import tomllib
from pathlib import Path

import pytest
import torch

import meshwright as mw
from examples import ternary_gradients as example
from examples.ternary_gradients import TernaryCompression
from meshwright.plan.strategy_interface import Strategy
from meshwright.verifier.static_checks import static_checks
from tests.command_line import checkpoint, forget_ranks, invoke, lay_out
from tests.tiny_model import analyzed_model, case_of, first_of, tiny_job, verdict_of

ANALYZED = analyzed_model()
SHARDS = mw.BatchSplit("dp_shard")


def planned(mesh: mw.Mesh, *strategies: Strategy, micro_batch: int = 2) -> mw.Plan:
    """The plan of those strategies."""
    return mw.make_plan(ANALYZED, tiny_job(), mesh, strategies, micro_batch)


def test_a_block_loses_at_most_what_its_largest_element_leaves():
    codec, noise = TernaryCompression(), torch.Generator().manual_seed(0)
    for numel in (1, 255, 256, 700):
        values = torch.randn(numel, generator=noise)
        lost = values.clone()
        codes = torch.zeros(codec.code_nbytes(numel), dtype=torch.uint8)
        codec.encode_in_place(lost, codes, None)
        for block, rest in zip(values.split(256), lost.split(256), strict=True):
            assert rest.square().sum() <= block.square().sum() - block.abs().max() ** 2 + 1e-5
    zeros = torch.zeros(300)
    codec.encode_in_place(zeros, torch.zeros(codec.code_nbytes(300), dtype=torch.uint8), None)
    assert not zeros.any()


@pytest.mark.parametrize(
    ("mesh", "strategies"),
    [
        (mw.Mesh(dp_replicate=3), (mw.BatchSplit(), mw.DDP(), TernaryCompression())),
        (mw.Mesh(dp_shard=3), (SHARDS, mw.ZeRO(stage=3), TernaryCompression())),
        (mw.Mesh(pp=2, dp_shard=2), (SHARDS, mw.ZeRO(stage=2), mw.Pipeline(), TernaryCompression())),
        (mw.Mesh(outer=2), (mw.DiLoCo(sync_every=1), TernaryCompression(axis="outer"))),
    ],
    ids=["ddp", "zero 3", "stages and shards", "sites"],
)
def test_a_codec_of_one_file_is_verified_like_those_of_the_library(
    mesh: mw.Mesh, strategies: tuple[Strategy, ...]
):
    plan = planned(mesh, *strategies)
    assert static_checks(plan) == []
    verdict = verdict_of(case_of(ANALYZED, plan))
    assert verdict.passed, verdict


def test_it_sends_the_bytes_of_its_law():
    plan = planned(mw.Mesh(dp_replicate=3), mw.BatchSplit(), mw.DDP(), TernaryCompression())
    part = -(-sum(param.numel for param in ANALYZED.model_spec.trainable) // 3)
    nbytes = -(-part // 4) + 4 * -(-part // 256)
    (reduce,) = (action for action in plan.for_rank(0).actions if action.kind == "REDUCE")
    assert [each.nbytes for each in reduce.transfer.messages] == [3 * nbytes, nbytes]
    traced = mw.trace(ANALYZED, plan)
    assert traced.passed, str(traced)


def test_without_error_feedback_it_is_refused():
    strategies = mw.BatchSplit(), mw.DDP(), TernaryCompression(error_feedback=False)
    with pytest.raises(mw.PlanError, match=r"error_feedback = False(?s:.*)repair: remove it"):
        planned(mw.Mesh(dp_replicate=3), *strategies)


def test_codes_that_say_something_else_are_noticed(monkeypatch: pytest.MonkeyPatch):
    decode_sum = TernaryCompression.decode_sum

    def halved(codec: TernaryCompression, codes: torch.Tensor, output: torch.Tensor) -> None:
        decode_sum(codec, codes, output)
        output.mul_(0.5)

    monkeypatch.setattr(TernaryCompression, "decode_sum", halved)
    plan = planned(mw.Mesh(dp_replicate=3), mw.BatchSplit(), mw.DDP(), TernaryCompression())
    assert first_of(verdict_of(case_of(ANALYZED, plan), 1))[1] == "sum of codes"


def test_a_config_names_it_by_its_file_for_plan_verify_and_two_processes(
    tmp_path, capsys, monkeypatch, forks
):
    forget_ranks(monkeypatch)
    codec = tmp_path / "ternary.py"
    codec.write_bytes(Path(example.__file__).read_bytes())
    named = {"name": "compress", "source": "ternary.py:TernaryCompression", "min_numel": 16}
    config = lay_out(tmp_path, strategies=[{"name": "batch_split"}, {"name": "ddp"}, named])
    code, out, err = invoke(capsys, "plan", config, "--out", tmp_path / "plan.toml")
    assert (code, err) == (0, "")
    assert "ternary: all_reduce over dp_replicate in REDUCE" in " ".join(out.split())
    written = tomllib.loads((tmp_path / "plan.toml").read_text())["strategies"]
    assert written[2]["source"] == f"{codec}:TernaryCompression"
    code, out, err = invoke(capsys, "verify", config, "--steps", 2)
    assert (code, err) == (0, ""), out
    code, out, err = forks("train", tmp_path / "plan.toml", "--train.steps", 2)
    assert (code, err) == (0, ""), out
    assert checkpoint(tmp_path / "run", 2).is_dir()
    codec.write_text(codec.read_text().replace("clamp_(-1, 1)", "clamp_(0, 1)"))
    code, _, err = invoke(capsys, "plan", tmp_path / "plan.toml")
    assert (code, "plan_hash is" in err) == (2, True), "another codec is another plan"
