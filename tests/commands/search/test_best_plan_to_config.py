"""The best configuration of a search as a config: it states what was estimated, `plan` accepts it, and it
equals one device.
"""

import json
import tomllib
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from meshwright.commands.plan import resolve_config
from meshwright.commands.search.search import (
    SearchOptions,
    SearchOutcome,
    outcome_as_dict,
    run_search,
    search_view,
    winner_config,
    write_config,
)
from meshwright.commands.verify import verify
from meshwright.plan.job.errors import PlanError
from meshwright.plan.strategy_state import local_state_nbytes
from meshwright.planner.analytic.compression_cost import residual_nbytes
from meshwright.planner.analytic.parallel_config import ParallelConfig
from meshwright.planner.machine.device_profile import ElementwiseTiming
from meshwright.run.measure.profile_files import write_profile
from tests.command_line import TEXT
from tests.planner.machine.synthetic_device import profile

LLAMA = {
    **{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 256, "hidden_size": 32},
    **{"intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"max_position_embeddings": 64, "tie_word_embeddings": False},
}
GPT2 = {
    **{
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": 256,
        "n_embd": 32,
        "n_layer": 4,
        "n_head": 4,
    },
    **{"n_positions": 64},
}
MIXTRAL = {
    **LLAMA,
    **{"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]},
    **{"num_local_experts": 4, "num_experts_per_tok": 2},
}
WISHES = {
    "replicas": (2, ("pp=1", "tp=1", "zero=0")),
    "hsdp": (4, ("pp=1", "tp=1", "zero=3", "dp_shard=2")),
    "matrices": (4, ("tp=2", "pp=1", "zero=1", "activation_checkpointing=layers")),
    "interleaved": (2, ("pp=2", "schedule=interleaved", "virtual_stages=2")),
    "zb_v": (4, ("pp=2", "schedule=zb_v", "dp=2", "zero=0")),
    "dualpipe": (2, ("pp=2", "schedule=dualpipe")),
    "ring": (3, ("cp=3", "context_parallel=ring", "zero=3")),
    "hybrid": (4, ("cp=4", "context_parallel=hybrid", "zero=0")),
    "states_on_hosts": (2, ("pp=1", "tp=1", "zero=2", "offload=device_step")),
    "states_on_disks": (2, ("pp=1", "tp=1", "zero=1", "offload=disk")),
    "activations_on_hosts": (1, ("activation_offload=layers", "activation_checkpointing=layers")),
    "states_of_one_on_its_host": (1, ("offload=device_step",)),
    "experts": (4, ("ep=2", "dp=4", "zero=1")),
    "experts_on_all_axes": (8, ("ep=2", "expert_tp=1", "tp=2", "pp=2", "dp=2")),
    "experts_on_cp_and_tp": (4, ("ep=4", "cp=2", "tp=2", "dp=1")),
    "experts_in_slices": (4, ("ep=2", "expert_tp=2", "tp=2", "dp=2")),
    "all": (8, ("cp=2", "tp=2", "pp=2", "context_parallel=ulysses", "schedule=1f1b")),
}
KINDS = {"replicas": "v100"}  # which has no bfloat16


def chosen(folder: Path, config: dict[str, Any], search_request: str, batch: int = 12) -> SearchOutcome:
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(config))
    devices, words = WISHES[search_request]
    node = folder / "node.toml"  # of a disk whose rate is known
    node.write_text('[device]\nlike = "a100"\nhost_memory_gb_s = 40\ndisk_gb_s = 5\n')
    kind = str(node) if "disks" in search_request else KINDS.get(search_request, "a100")
    return run_search(
        SearchOptions(
            str(folder / "model"),
            devices,
            kind,
            batch,
            24,
            constraints=words,
            num_kept=1,
        )
    )


def coded(folder: Path, *words: str, device: str = "device.toml") -> SearchOutcome:
    """A search over hosts of two devices that share a slow network, whose seconds to code were measured."""
    write_profile(replace(profile(), codings=(ElementwiseTiming("int8", 1e-9),)), folder / "measured.toml")
    links = "link_gb_s = 10\nnic_gb_s = 0.01\nper_host = 2\n"
    (folder / "device.toml").write_text(f'[device]\nmeasured = "measured.toml"\n{links}')
    (folder / "model").mkdir(exist_ok=True)
    (folder / "model" / "config.json").write_text(json.dumps(LLAMA))
    hardware = str(folder / device) if device.endswith(".toml") else device
    constraints = ("pp=1", "tp=1", "zero=2", *words)
    return run_search(SearchOptions(str(folder / "model"), 4, hardware, 12, 24, constraints=constraints))


def test_codes_are_proposed_only_if_lossy_is_allowed_and_written_as_compress(tmp_path: Path):
    for words in ((), ("lossy=false",)):
        assert not any(row["is_lossy"] for row in outcome_as_dict(coded(tmp_path, *words))["configurations"])
    found = coded(tmp_path, "lossy=true")
    best, rows = found.result.best[0].config, outcome_as_dict(found)["configurations"]
    assert (best.compress, best.zero_group_size) == ("int8", 2)
    assert [row["is_lossy"] for row in rows] == ["(lossy)" in row["name"] for row in rows]
    assert rows[0]["bytes"]["residuals"] > 0
    assert any("int8 codes pay over links slower than" in note for note in found.notes)
    path, rest = written(found, tmp_path)
    assert "Lossy: gradients are summed as codes" in path.read_text()
    plan = resolve_config(path, rest, None)[1].plan
    states = plan.for_rank(0).states["compress"]
    owed = sum(local_state_nbytes(each, plan.rank_view(0)) for each in states)
    numel = sum(each.numel for each in plan.sharding.model_spec.trainable)
    assert owed == pytest.approx(residual_nbytes(best, numel), rel=0.01)


def test_lossy_is_refused_where_coding_was_not_measured_and_on_several_kinds(tmp_path: Path):
    with pytest.raises(PlanError, match=r"seconds to code are not known on A100(?s:.*)bench device"):
        coded(tmp_path, "lossy=true", device="a100")
    with pytest.raises(PlanError, match="lossy = true on several kinds of devices"):
        coded(tmp_path, "lossy=true", device="a100:2,h100:2")
    with pytest.raises(PlanError, match=r"lossy is 'maybe'(?s:.*)choose one of: false, true"):
        coded(tmp_path, "lossy=maybe")


def written(found: SearchOutcome, folder: Path) -> tuple[Path, list[str]]:
    path = folder / "chosen.toml"
    write_config(found, path)
    (folder / "text.txt").write_text(TEXT)
    return path, [
        "--data.source",
        str(folder / "text.txt"),
        "--run.folder",
        str(folder / "run"),
        "--train.steps",
        "2",
        "--lr_schedule.warmup",
        "0",
    ]


@pytest.mark.parametrize("search_request", [name for name in WISHES if "experts" not in name])
def test_plan_takes_what_was_chosen(tmp_path: Path, search_request: str):
    found = chosen(tmp_path, LLAMA, search_request)
    path, rest = written(found, tmp_path)
    plan = resolve_config(path, rest, None)[1].plan
    layout: ParallelConfig = found.result.best[0].config
    mesh = plan.mesh
    assert (mesh.pp, mesh.tp, mesh.cp, mesh.dp_replicate * mesh.dp_shard) == (
        layout.pp,
        layout.tp,
        layout.cp,
        layout.dp,
    )
    assert plan.micro_batch == layout.micro_batch
    assert plan.job.train.batch == 12


@pytest.mark.parametrize("search_request", ["hsdp", "zb_v", "states_on_hosts"])
def test_what_was_chosen_equals_one_device(tmp_path: Path, search_request: str):
    path, rest = written(chosen(tmp_path, LLAMA, search_request), tmp_path)
    verdict, _ = verify(path, rest, 1, None, None, None, shrink=False)
    assert verdict.passed


def test_plan_takes_what_was_chosen_for_another_family(tmp_path: Path):
    path, rest = written(chosen(tmp_path, GPT2, "all"), tmp_path)
    assert resolve_config(path, rest, None)[1].plan.mesh.world_size == 8


@pytest.mark.parametrize("search_request", ["experts", "experts_on_all_axes"])
def test_plan_takes_the_experts_that_were_chosen(tmp_path: Path, search_request: str):
    found = chosen(tmp_path, MIXTRAL, search_request)
    path, rest = written(found, tmp_path)
    plan = resolve_config(path, rest, None)[1].plan
    layout = found.result.best[0].config
    assert plan.mesh.ep == layout.ep == 2
    assert plan.mesh.dp_replicate * plan.mesh.dp_shard * plan.mesh.ep == layout.dp


def test_experts_are_folded_over_cp_and_tp_where_dp_has_no_ranks_for_them(tmp_path: Path):
    tables = winner_config(chosen(tmp_path, MIXTRAL, "experts_on_cp_and_tp"), "m")
    assert tables["mesh"] == {"cp": 2, "tp": 2}
    assert {"name": "expert_parallel", "over": ["cp", "tp"]} in tables["strategies"]


@pytest.mark.parametrize("search_request", ["experts", "experts_on_cp_and_tp", "experts_in_slices"])
def test_experts_that_were_chosen_equal_one_device(tmp_path: Path, search_request: str):
    path, rest = written(chosen(tmp_path, MIXTRAL, search_request), tmp_path)
    verdict, _ = verify(path, rest, 1, None, None, None, shrink=False)
    assert verdict.passed


def test_ep_is_found_for_a_model_whose_experts_fill_devices():
    text = "layers 94 hidden 4096 heads 64 kv_heads 4 head 128 vocab 151936 gated experts 128 top_k 8"
    options = SearchOptions(f"qwen3: {text} expert_ffn 1536", 64, "h100", 256, 4096, num_kept=2)
    assert run_search(options).result.best[0].config.expert_tp > 1  # slices have no busiest rank
    found = run_search(replace(options, constraints=("expert_tp=1",)))
    assert found.result.best[0].config.ep > 1
    names = [(each["name"], each.get("axis")) for each in winner_config(found, "m")["strategies"]]
    assert ("expert_parallel", None) in names
    assert ("batch_split", "ep") in names
    row = outcome_as_dict(found)["configurations"][0]
    assert row["peak_bytes_at_most"] > row["peak_bytes"]
    assert "1.6 times the mean" in outcome_as_dict(found)["assumptions"]["experts"]


def test_uneven_stages_of_heterogeneous_devices_are_cuts_that_plan_accepts(tmp_path: Path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({**LLAMA, "num_hidden_layers": 6}))
    found = run_search(
        SearchOptions(str(tmp_path / "model"), 0, "h100:3,a100:1", 12, 24, constraints=("pp=4",), num_kept=1)
    )
    counts = [count for _, count in found.result.best[0].layer_assignment]
    assert len(counts) == 4
    assert sum(counts) == 6
    path, rest = written(found, tmp_path)
    cuts = tuple(f"model.layers.{begin}" for begin in list(accumulate(counts))[:-1])
    assert tuple(tomllib.loads(path.read_text())["strategies"][0]["split_points"]) == cuts
    assert resolve_config(path, rest, None)[1].plan.sharding.split_points == cuts


def test_choices_that_a_config_cannot_state_are_reported():
    shape = "m: layers 24 hidden 2048 heads 16"
    assert "split_points" not in str(
        winner_config(run_search(SearchOptions(shape, 0, "h100:8,a100:8", 64, constraints=("pp=2",))), "m")
    )
    told = [
        str(each)
        for each in search_view(
            run_search(SearchOptions(shape, 0, "h100:8,a100:8", 64, constraints=("pp=2",)))
        ).renderables
    ]
    assert any("start them on the H100, then on the A100" in each for each in told)
    assert any("are not written" in each for each in told)
    outside = run_search(SearchOptions(shape, 16, "a100", 64, constraints=("intra_host=dp", "tp=2")))
    assert any("start the ranks in that order" in str(each) for each in search_view(outside).renderables)
