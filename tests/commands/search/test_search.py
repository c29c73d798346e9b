"""The search command: from sizes or a config to a ranked table and a config that resolves; refusals."""

import json
from dataclasses import replace
from io import StringIO
from pathlib import Path
from re import findall

import pytest
from rich.console import Console
from transformers import OPTConfig

from meshwright.commands.search.search import (
    SearchOptions,
    outcome_as_dict,
    run_search,
    search_view,
    winner_config,
    write_config,
)
from meshwright.parallel import STRATEGIES
from meshwright.parallel.memory.tiers.disk_offload import DiskOffload
from meshwright.plan.job.errors import PlanError
from meshwright.report.search.assumptions_and_cost import TrainingBudget
from meshwright.run.config.config_and_plan_files import read_request

SMALL = "small: layers 24 hidden 2048 heads 16 gated vocab 32000"


def shown(asked: SearchOptions) -> str:
    file = StringIO()
    Console(width=240, file=file).print(search_view(run_search(asked)))
    return file.getvalue()


def test_a_model_given_by_its_sizes_is_planned_and_explained():
    text = shown(SearchOptions(SMALL, 8, "a100", 64, budget=TrainingBudget(1e9, 2.0)))
    assert "1.74 B parameters on 8 A100" in text
    assert "The model fits on each device" in text
    assert "is the fastest: " in text
    assert "takes" in text
    assert "1e+09 tokens take" in text
    assert "of the cost) is the pipeline bubble" in text
    assert "memory in GiB, on the rank that uses most" in text
    assert all(
        word in text
        for word in ("weights", "gradients", "states", "activations", "gathered", "loss", "margin")
    )


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("13b: layers 40 hidden 5120 heads 40", "The model does not fit on one device"),
        (
            "odd: layers 4 hidden 81920 heads 640",
            "Not even one layer with its output and its optimizer states fits",
        ),
    ],
)
def test_the_scenario_is_described(model: str, message: str):
    assert message in shown(SearchOptions(model, 512, "a100", 512))


def test_the_winner_is_a_config_that_resolves(tmp_path: Path):
    chosen = run_search(
        SearchOptions("13b: layers 40 hidden 5120 heads 40", 64, "a100", 128, constraints=("tp=4", "pp=2"))
    )
    best = chosen.result.best[0].config
    assert (best.tp, best.pp) == (4, 2)
    path = tmp_path / "plan.toml"
    write_config(chosen, path)
    request = read_request(path, ["--data.source", "b"], STRATEGIES)
    assert (request.mesh["tp"], request.mesh["pp"]) == (4, 2)
    assert {"pipeline", "tensor_parallel", "sequence_parallel", "vocab_parallel"} <= {
        strategy.name for strategy in request.strategies or ()
    }
    assert request.job.train.batch == 128
    assert request.job.precision.compute == best.dtype == "bfloat16"
    assert request.micro_batch == best.micro_batch


def test_what_is_shown_is_there_as_plain_values():
    chosen = run_search(SearchOptions(SMALL, 8, "h100", 64, budget=TrainingBudget(1e12, 3.0)))
    said = json.loads(json.dumps(outcome_as_dict(chosen)))
    first = said["configurations"][0]
    assert first["step_s"] == pytest.approx(sum(first["seconds"].values()))
    assert first["days"] == pytest.approx(1e12 / first["tokens_per_s"] / 86400)
    assert first["cost"] == pytest.approx(first["days"] * 24 * 8 * 3.0)
    assert first["energy_kwh"] == pytest.approx(first["days"] * 24 * 8 * 0.7)
    assert 0 < first["mfu"] < 1
    assert len(winner_config(chosen, "m")["strategies"]) >= 1


def test_data_parallelism_comes_first_for_a_model_that_fits_or_the_reason_is_said():
    tiny = "3m: layers 4 hidden 256 heads 8 vocab 256 sequence 1024 gated"
    found = run_search(SearchOptions(tiny, 8, "h100", 64))
    first, second = found.result.best[:2]
    assert (first.config.dp, first.config.tp, first.config.pp) == (8, 1, 1)
    assert second.seconds < first.seconds
    text = " ".join(outcome_as_dict(found)["reasons"])
    assert "Data parallelism alone comes first: dp 2, pp 4" in text
    assert "% less, and estimates are off by 5 %" in text
    assert "Too large for the memory" not in text
    odd = " ".join(outcome_as_dict(run_search(SearchOptions(tiny, 8, "h100", 4)))["reasons"])
    assert "a batch of 4 sequences does not divide by 8 devices" in odd


def test_a_model_that_fits_nowhere_is_reported_with_the_missing_memory():
    with pytest.raises(PlanError) as raised:
        run_search(SearchOptions("175b: layers 96 hidden 12288 heads 96", 8, "v100", 64))
    text = str(raised.value)
    assert "nothing fits: 175b needs" in text
    assert "V100 has" in text
    [(many, rows)] = findall(r"more devices \((\d+)(?: and (\d+) rows)?\)", text)
    assert run_search(
        SearchOptions("175b: layers 96 hidden 12288 heads 96", int(many), "v100", int(rows or 64))
    ).result.best


def test_what_is_fixed_is_named_where_it_is_in_the_way():
    with pytest.raises(PlanError, match="fix fewer axes, without which something fits"):
        run_search(
            SearchOptions(
                "1t: layers 128 hidden 25600 heads 160", 256, "h100", 512, constraints=("pp=1", "tp=1")
            )
        )


@pytest.mark.parametrize(
    "asked", [SearchOptions(SMALL, 8, "h100", 10**23), SearchOptions(SMALL, 10**23, "h100", 8)]
)
def test_numbers_that_no_machine_has_are_refused_at_once(asked: SearchOptions):
    with pytest.raises(PlanError, match="1e\\+23 is above 4,294,967,296"):
        run_search(asked)


@pytest.mark.parametrize("text", ["layers 12 hidden 768 heads 12", "s= layers 12 hidden 768 heads 12"])
def test_sizes_that_are_badly_written_are_not_taken_for_a_file(text: str):
    with pytest.raises(PlanError, match="no value for layers"):
        run_search(SearchOptions(text, 8, "h100", 8))


def test_a_model_whose_weights_differ_from_its_sizes_is_reported(tmp_path: Path):
    """Words of another width than the hidden states."""
    sizes = {"hidden_size": 64, "ffn_dim": 64, "word_embed_proj_dim": 512, "max_position_embeddings": 64}
    config = OPTConfig(num_hidden_layers=2, num_attention_heads=2, vocab_size=500, **sizes)
    config.architectures = ["OPTForCausalLM"]
    config.save_pretrained(tmp_path)
    assert "expect seconds and bytes to be off by as much" in shown(
        SearchOptions(str(tmp_path), 2, "a100", 4, sequence=32)
    )


def test_all_contradictions_are_reported_at_once():
    with pytest.raises(PlanError) as raised:
        run_search(SearchOptions(SMALL, 8, "a100", 64, constraints=("tp", "pp=3")))
    assert "'tp' has no value" in str(raised.value)
    assert "write NAME=VALUE, for example tp=8" in str(raised.value)
    assert "pp 3 does not divide 8 devices" in str(raised.value)


def test_model_hardware_links_and_options_are_refused_together():
    with pytest.raises(PlanError) as raised:
        run_search(
            SearchOptions(
                "nosuch",
                8,
                "foo",
                64,
                constraints=("tp=x",),
                max_fit="foo",
                cluster="nope.toml",
                calibration_run="nowhere",
            )
        )
    places = " ".join(fault.location for fault in raised.value.diagnostics)
    assert all(place in places for place in ("--hardware", "nope.toml", "nowhere", "--set", "--fit")), places
    assert "nosuch" in raised.value.diagnostics[0].problem
    assert len(raised.value.diagnostics) == 6


def test_every_unknown_kind_of_device_is_reported():
    with pytest.raises(PlanError) as raised:
        run_search(SearchOptions(SMALL, 9, "foo:4,bar:4", 64))
    text = str(raised.value)
    assert all(part in text for part in ("'foo' is not a known", "'bar' is not a known", "--devices 9"))


def test_a_batch_that_no_replicas_can_share_is_reported():
    with pytest.raises(PlanError, match="a batch of 7 samples on 8 data-parallel replicas"):
        run_search(SearchOptions(SMALL, 8, "a100", 7, constraints=("dp=8",)))
    with pytest.raises(PlanError, match="no mesh of 8 devices takes 7 samples"):
        run_search(SearchOptions(SMALL, 8, "a100", 7, constraints=("pp=4", "tp=1")))
    with pytest.raises(
        PlanError,
        match="7 samples on 2 data-parallel ranks\n  repair: each takes as many samples: choose a batch of 8",
    ):
        run_search(SearchOptions(SMALL, 8, "a100", 7, constraints=("pp=4", "tp=1")))


def test_a_schedule_that_no_mesh_can_have_is_reported():
    with pytest.raises(PlanError, match="1 microbatches with virtual stages on pp 2"):
        run_search(
            SearchOptions(SMALL, 2, "a100", 64, constraints=("schedule=interleaved", "micro_batch=64"))
        )


def test_figures_of_links_are_read_for_one_kind_and_refused_for_several():
    with pytest.raises(PlanError, match=r"nowhere\.toml"):
        run_search(SearchOptions(SMALL, 0, "h100:8", 64, cluster="nowhere.toml"))
    with pytest.raises(PlanError, match=r"--cluster nowhere\.toml on several kinds of devices"):
        run_search(SearchOptions(SMALL, 0, "h100:4,a100:4", 64, cluster="nowhere.toml"))


def node(folder: Path, *lines: str) -> str:
    """A [device] table: an H100 with a host of known memory."""
    (folder / "node.toml").write_text(
        "\n".join(['[device]\nlike = "h100"\nhost_memory_gb_s = 40', *lines]) + "\n"
    )
    return str(folder / "node.toml")


def test_what_fits_nowhere_is_offloaded_to_hosts_and_written(tmp_path: Path):
    asked = SearchOptions("13b: layers 40 hidden 5120 heads 40", 1, node(tmp_path, "host_gb = 1024"), 8)
    found, text = run_search(asked), shown(asked)
    assert "nothing fits without offload to host memory" in text
    assert "63 GB/s to and from its host, 40 GB/s in the memory of the host; hosts 1,024 GiB" in text
    assert "each host" in text
    row = outcome_as_dict(found)["configurations"][0]
    assert row["host_bytes"] > 12 * 12.8e9
    assert row["seconds"]["host_copies"] >= 0
    write_config(found, tmp_path / "plan.toml")
    request = read_request(tmp_path / "plan.toml", ["--data.source", "b"], STRATEGIES)
    assert "offload" in [each.name for each in request.strategies or ()]
    with pytest.raises(PlanError, match="nothing fits"):
        run_search(replace(asked, constraints=("offload=none",)))


def test_a_host_that_is_too_small_is_refused_with_its_numbers(tmp_path: Path):
    asked = SearchOptions("13b: layers 40 hidden 5120 heads 40", 1, node(tmp_path, "host_gb = 64"), 8)
    with pytest.raises(PlanError, match="hosts with more memory than 64 GiB"):
        run_search(asked)
    with pytest.raises(PlanError, match="no host holds what its ranks keep there") as raised:
        run_search(replace(asked, constraints=("offload=everything",)))
    assert "of 64" in str(raised.value)
    assert "--set offload=disk" in str(raised.value)
    assert "host_gb" in str(raised.value)


def test_states_that_no_host_holds_go_to_its_disk_and_are_written(tmp_path: Path):
    machine = node(tmp_path, "host_gb = 64", "disk_gb_s = 5")
    asked = SearchOptions("13b: layers 40 hidden 5120 heads 40", 1, machine, 8)
    found, text = run_search(asked), shown(asked)
    assert "optimizer states on disk, stepped on the host" in text
    assert "nothing fits without offload to disk" in text
    assert "on its disk (disk_offload.folder), whose free space is not known: write disk_gb" in text
    assert "5 GB/s to and from its disk; hosts 64 GiB" in text
    row = outcome_as_dict(found)["configurations"][0]
    assert row["disk_bytes"] == pytest.approx(12 * found.request.shape.numel, rel=0.001)
    assert row["host_bytes"] < 64 * 2**30
    full = node(tmp_path, "host_gb = 64", "disk_gb_s = 5", "disk_gb = 20")
    with pytest.raises(PlanError, match="disks with more than 20 GiB free"):
        run_search(replace(asked, hardware=full))
    with pytest.raises(
        PlanError, match=r"no disk holds what the ranks of its host keep there: \d+ GiB of 20"
    ):
        run_search(replace(asked, hardware=full, constraints=("offload=disk",)))
    write_config(found, tmp_path / "plan.toml")
    comments = " ".join((tmp_path / "plan.toml").read_text().replace("\n# ", " ").split())
    assert "name one on a fast disk of each host" in comments
    request = read_request(tmp_path / "plan.toml", ["--data.source", "b"], STRATEGIES)
    assert [each.folder for each in request.strategies or () if isinstance(each, DiskOffload)] == [
        "/nvme/scratch"
    ]


def test_the_largest_model_of_a_machine_is_found_for_each_mode_with_days_and_cost(tmp_path: Path):
    asked = SearchOptions(
        SMALL,
        1,
        node(tmp_path, "host_gb = 512", "disk_gb_s = 5"),
        8,
        budget=TrainingBudget(1e9, 2.0),
        max_fit="model",
        num_kept=2,
    )
    found = run_search(asked)
    said = json.loads(json.dumps(outcome_as_dict(found)))
    sizes = [row["parameters"] for row in said["models"]]
    assert [row["mode"] for row in said["models"]] == [
        *("none", "device_step", "host_step"),
        *("gradients", "everything", "disk"),
    ]
    assert sizes[:-1] == sorted(sizes[:-1])
    assert found.request.shape.numel == max(sizes)
    assert said["models"][-1]["disk_bytes"] == pytest.approx(12 * sizes[-1], rel=0.001)
    assert all(row["days"] > 0 and row["cost"] > 0 for row in said["models"])
    text = shown(asked)
    assert "the largest model of these proportions, on 1 H100 of node.toml" in text
    write_config(found, tmp_path / "plan.toml")
    model = json.loads((tmp_path / "plan-model.json").read_text())
    assert model["num_hidden_layers"] == found.request.shape.layers


def test_offload_on_several_kinds_of_devices_is_refused():
    with pytest.raises(PlanError, match="offload on several kinds of devices"):
        run_search(SearchOptions(SMALL, 0, "h100:8,a100:8", 64, constraints=("offload=device_step",)))
