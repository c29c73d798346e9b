"""A config with `algorithm = "auto"` becomes a plan that contains the rule and needs no cluster file."""

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.commands.plan import read_config, resolve, resolve_config, write_plan
from meshwright.parallel import STRATEGIES
from meshwright.parallel.memory.memory_budget import MemoryBudget
from meshwright.plan.hardware.measured_cluster import AllReduceSeries, Cluster, FitError
from meshwright.plan.hardware.network_model import LinkCost, NetworkModel, SizeBand
from meshwright.plan.job import job
from meshwright.plan.job.errors import PlanError, format_nbytes
from meshwright.plan.plan import Plan
from meshwright.run.config.config_and_plan_files import read_request
from meshwright.run.measure.cluster_file import describe_machine, write_cluster
from meshwright.run.measure.profile_files import write_profile
from tests.command_line import LLAMA, SEQUENCE, forget_ranks, invoke, lay_out
from tests.commands.test_predict import profile

SERIES = AllReduceSeries("ring", 3, (1024, 1 << 20, 64 << 20), (1e-3, 1e-2, 1e-1), (0.0, 0.0, 0.0))
LATENT, SLOW = (
    NetworkModel(inter_host=LinkCost((SizeBand(0, *figures),))) for figures in ((1e-2, 1e12), (1e-9, 1e6))
)
AUTO = [{"name": "batch_split"}, {"name": "ddp", "algorithm": "auto"}]


def measured(path: Path, network: NetworkModel) -> None:
    empty = Cluster("", describe_machine(), "2.13", "gloo", 1, FitError(0, 0), network, (SERIES,))
    write_cluster(replace(empty, measurements=(replace(SERIES, algorithm="one_shot", ranks=7),)), path)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    measured(tmp_path / "links.toml", LATENT)
    return lay_out(tmp_path, cluster="links.toml", strategies=AUTO, mesh={"dp_replicate": 3})


def test_the_written_plan_holds_the_rule_and_needs_no_cluster_any_more(config: Path, tmp_path: Path):
    resolved = resolve_config(config, [], None)
    write_plan(resolved, tmp_path / "plan.toml")
    document = tomllib.loads((tmp_path / "plan.toml").read_text())
    assert "cluster" not in document
    assert document["strategies"][1]["algorithm"] == "one_shot"
    (tmp_path / "links.toml").unlink()
    again, ready = resolve_config(tmp_path / "plan.toml", [], None)
    assert again == resolved[0]
    assert ready.notes == ()


def test_other_links_give_another_plan(config: Path, tmp_path: Path):
    measured(tmp_path / "slow.toml", SLOW)
    first, other = (
        resolve_config(config, [], None),
        resolve_config(config, ["--cluster", str(tmp_path / "slow.toml")], None),
    )
    assert other[0].strategies is not None
    assert first[1].plan.hash != other[1].plan.hash
    assert "one_shot" not in other[0].strategies[1].as_dict()["algorithm"]


def test_the_file_is_looked_for_beside_the_config_and_from_the_current_folder_when_typed(
    config: Path, monkeypatch: pytest.MonkeyPatch
):
    assert read_request(config, [], STRATEGIES).cluster == str(config.parent / "links.toml")
    (config.parent / "elsewhere").mkdir()
    measured(config.parent / "elsewhere" / "links.toml", SLOW)
    monkeypatch.chdir(config.parent / "elsewhere")
    assert read_request(config, [], STRATEGIES).cluster == str(config.parent / "links.toml")
    typed = read_request(config, ["--cluster", "links.toml"], STRATEGIES)
    assert typed.cluster == str(config.parent / "elsewhere" / "links.toml")


def test_without_a_cluster_the_plan_is_refused_with_the_command_that_measures_one(tmp_path: Path):
    config = lay_out(tmp_path, strategies=AUTO, mesh={"dp_replicate": 3})
    with pytest.raises(PlanError) as raised:
        resolve_config(config, [], None)
    assert "meshwright bench network" in raised.value.diagnostics[0].fix


def test_plan_says_what_was_chosen_and_why(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    forget_ranks(monkeypatch)
    code, out, _ = invoke(capsys, "plan", config)
    assert code == 0
    assert "auto chose 'one_shot' for 3 ranks, because 64 MiB takes" in " ".join(out.split())


def test_plan_shows_the_memory_of_sequences_that_are_generated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    forget_ranks(monkeypatch)
    mesh, strategies = {"dp_replicate": 1, "tp": 2}, [{"name": "tensor_parallel"}]
    config = lay_out(tmp_path, model={"source": "llama.json"}, strategies=strategies, mesh=mesh)
    head_dim = LLAMA["hidden_size"] // LLAMA["num_attention_heads"]
    expected = 2 * LLAMA["num_hidden_layers"] * 5 * SEQUENCE * head_dim * 4  # one head of keys, on both
    code, out, err = invoke(capsys, "plan", config, "--max-num-seqs", "5")
    assert code == 0, err
    text = (
        f"keys and values of 5 sequences of {SEQUENCE} tokens (generate): {format_nbytes(expected)} on rank"
    )
    assert text in " ".join(out.split())
    code, out, _ = invoke(capsys, "plan", config, "--max-num-seqs", "5", "--hardware", "h100")
    assert code == 0
    shown = " ".join(out.split())
    assert "the device has memory for" in shown
    assert "of weights that are gathered" not in shown
    assert "generate sends" in shown
    assert "(DECODE" in shown
    assert f"for prompts of {SEQUENCE} tokens, then" in shown
    assert "tokens per second of all ranks" in shown
    code, out, _ = invoke(capsys, "plan", config, "--max-num-seqs", "5", "--actions")
    assert code == 0
    assert "forward on one token of each row of" in " ".join(out.split())
    shards = lay_out(tmp_path, model={"source": "llama.json"}, mesh={"dp_replicate": 1, "dp_shard": 2})
    code, out, _ = invoke(capsys, "plan", shards, "--max-num-seqs", "5", "--hardware", "h100")
    assert code == 0
    assert "of weights that are gathered" in " ".join(out.split())
    assert "of weights once" in " ".join(out.split())
    code, _, err = invoke(capsys, "plan", config, "--max-num-seqs", "0")
    assert code != 0
    assert "--max-num-seqs 0; needed is a whole number of at least 1" in " ".join(err.split())


def test_plan_shows_the_memory_of_sequences_that_ranks_divide(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    forget_ranks(monkeypatch)
    config = lay_out(tmp_path, model={"source": "llama.json"}, mesh={"dp_replicate": 1, "cp": 2})
    head_dim = LLAMA["hidden_size"] // LLAMA["num_attention_heads"]
    features = 2 * LLAMA["num_key_value_heads"] * head_dim
    expected = LLAMA["num_hidden_layers"] * 5 * -(-SEQUENCE // 2) * features * 4
    divided = "--decode-context-parallel"
    code, out, err = invoke(capsys, "plan", config, "--max-num-seqs", "5", divided)
    assert code == 0, err
    text = f"tokens (generate), divided over 2 ranks: {format_nbytes(expected)} on rank"
    assert text in " ".join(out.split())
    code, _, err = invoke(capsys, "plan", config, divided)
    assert code != 0
    assert "--max-num-seqs is missing repair: pass --max-num-seqs 8 too" in " ".join(err.split())
    whole = lay_out(tmp_path, model={"source": "llama.json"}, mesh={"dp_replicate": 2})
    code, _, err = invoke(capsys, "plan", whole, "--max-num-seqs", "5", divided)
    assert code != 0
    assert "the plan shards no sequence" in " ".join(err.split())


def test_a_config_is_checked_once(config: Path, monkeypatch: pytest.MonkeyPatch):
    runs: list[str] = []

    def counted(function):
        def count(*args):
            runs.append(function.__name__ if len(args) == 1 else args[1])
            return function(*args)

        return count

    checks = job.CROSS_FIELD_CHECKS
    monkeypatch.setattr(job, "CROSS_FIELD_CHECKS", tuple(map(counted, checks)))
    monkeypatch.setattr(job, "field_diagnostics", counted(job.field_diagnostics))
    (request, _) = resolve_config(config, [], None)
    tables = [*vars(request.job), "run"]
    assert runs == [*tables, *(check.__name__ for check in checks)]


def test_the_plan_of_a_gpu_is_aligned_and_its_file_stays_so_on_a_cpu(tmp_path: Path):
    config = lay_out(tmp_path, mesh={"dp_replicate": 3})
    assert resolve_config(config, [], None)[1].plan.align_bytes == 1
    resolved = resolve(read_config(config, [], "h100", ""), None)
    write_plan(resolved, tmp_path / "plan.toml")
    again, ready = resolve_config(tmp_path / "plan.toml", [], None)
    assert (again, ready.plan.align_bytes, ready.plan.hash) == (resolved[0], 128, resolved[1].plan.hash)
    assert ready.plan == resolved[1].plan


def test_a_plan_file_without_an_alignment_has_none_and_a_gpu_is_told(tmp_path: Path):
    config = lay_out(tmp_path, mesh={"dp_replicate": 3})
    write_plan(resolve_config(config, [], None), tmp_path / "plan.toml")
    text = (tmp_path / "plan.toml").read_text()
    (tmp_path / "plan.toml").write_text(text.replace("align_bytes = 1\n", ""))
    ready = resolve_config(tmp_path / "plan.toml", ["--run.hardware", "h100"], None)[1]
    assert ready.plan.align_bytes == 1
    assert [note for note in ready.notes if "set align_bytes = 128" in note]


@pytest.mark.parametrize(
    ("precision", "is_said"), [({}, True), ({"tf32": True}, False), ({"compute": "bfloat16"}, False)]
)
def test_float32_on_a_gpu_is_said_with_the_repair(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], precision: dict[str, object], *, is_said: bool
):
    config = lay_out(tmp_path, precision=precision, run={"hardware": "h100"})
    _, said, _ = invoke(capsys, "plan", config)
    assert " ".join(said.split()).count("precision.tf32 = true") == is_said


def test_a_memory_budget_takes_the_predicted_seconds_of_blocks_and_the_plan_keeps_them(tmp_path: Path):
    write_profile(profile(), tmp_path / "device.toml")
    strategies = [{"name": "memory_budget", "budget_mb": 1e6}]
    config = lay_out(tmp_path, strategies=strategies, mesh={"dp_replicate": 1})
    plain = resolve_config(config, [], None)[1].plan
    assert (memory_budget(plain).forward_ms, memory_budget(plain).host_gb_per_s) == ((), 0)
    resolved = resolve_config(config, ["--run.hardware", str(tmp_path / "device.toml")], None)
    plan, calls = resolved[1].plan, plain.model_spec.block_calls
    assert len(memory_budget(plan).forward_ms) == len(calls)
    assert min(memory_budget(plan).forward_ms) > 0
    assert memory_budget(plan).host_gb_per_s == 0  # a CPU has no host
    matmul_ms = memory_budget(plan).matmul_ms
    assert max(matmul_ms) > 0
    assert all(part <= whole for part, whole in zip(matmul_ms, memory_budget(plan).forward_ms, strict=True))
    assert any("as predicted on A CPU" in note for note in resolved[1].notes)
    write_plan(resolved, tmp_path / "plan.toml")
    (tmp_path / "device.toml").unlink()
    again = resolve_config(tmp_path / "plan.toml", [], None)[1]
    assert (again.plan.hash, again.notes) == (plan.hash, ())
    given = [{**strategies[0], "forward_ms": [float(n) for n, _ in enumerate(calls)]}]
    kept = resolve_config(lay_out(tmp_path, strategies=given, mesh={"dp_replicate": 1}), [], None)[1].plan
    assert memory_budget(kept).forward_ms == tuple(given[0]["forward_ms"])


def test_a_memory_budget_takes_the_host_link_of_a_gpu(tmp_path: Path):
    of_device = ["--run.hardware", "h100"]
    found = []
    for more in ([], [{"name": "activation_offload"}]):
        strategies = [{"name": "memory_budget", "budget_mb": 1e6}, *more]
        config = lay_out(
            tmp_path, strategies=strategies, mesh={"dp_replicate": 1}, precision={"compute": "bfloat16"}
        )
        ready = resolve_config(config, of_device, None)[1]
        assert memory_budget(ready.plan).forward_ms
        found.append((memory_budget(ready.plan).host_gb_per_s, "copies 63 GB/s" in " ".join(ready.notes)))
    assert found == [(63, True), (0, False)]  # activation_offload decides alone what is copied


def memory_budget(plan: Plan) -> MemoryBudget:
    return next(each for each in plan.strategies if isinstance(each, MemoryBudget))


def test_a_plan_explains_the_graphs_of_its_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)  # its thread outlives a test
    forget_ranks(monkeypatch)
    compiled = {"name": "compile", "backend": "aot_eager"}
    config = lay_out(tmp_path, strategies=[{"name": "batch_split"}, {"name": "ddp"}, compiled])
    text = invoke(capsys, "plan", str(config), "--explain-model")[1]
    assert "graphs of blocks under torch.compile, on one rank\n" in text
    assert "Block" in text
    assert "graphs of blocks" not in invoke(capsys, "plan", str(config))[1]
    code, _, error = invoke(capsys, "plan", str(config), "--compile")
    assert code == 2
    assert "can be compiled before a run: the backend 'aot_eager' keeps nothing" in error
