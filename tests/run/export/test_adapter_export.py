"""Export of a PEFT adapter: the same under every data-parallel strategy, complete, and loadable by peft
alone.
"""

import json
from dataclasses import replace
from pathlib import Path

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn

from meshwright.api import parallelize
from meshwright.comm.collectives.group import World
from meshwright.commands.plan import resolve_config
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.model.loading.deferred_init import defer_init
from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.job import OptimizerConfig
from meshwright.plan.plan import Plan
from meshwright.run.export import adapter_export
from meshwright.run.export.adapter_export import ADAPTER_FILE
from meshwright.run.export.hf_export import ExportableModel, ExportResult, export_model, initial_model
from meshwright.run.training.train_loop import save_run_checkpoint
from meshwright.testing.ranks import run_on_threads
from tests.command_line import invoke, lay_out
from tests.model.hf.lora_models import QUIET, adapted, adapted_reading, base, stirred, stored_base
from tests.model.hf.test_peft_name_map import planned
from tests.model.published_models import logits
from tests.tiny_model import token_samples

pytestmark = QUIET
CONFIG = "adapter_config.json"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The base, as somebody published it."""
    place = tmp_path_factory.mktemp("published")
    stored_base(place)
    return place


def of_peft(folder: Path, adapter: Path) -> nn.Module:
    """Returns what peft makes of the stored base and an adapter, in eval mode."""
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return peft.PeftModel.from_pretrained(theirs, str(adapter)).eval()


def trained(analyzed: AnalyzedModel, plan: Plan, out: Path) -> tuple[ExportResult, dict[str, torch.Tensor]]:
    """Two steps on every rank of `plan`, and what was written; the values that were trained."""

    def rank(world: World) -> tuple[ExportResult | None, dict[str, torch.Tensor]]:
        with parallelize(analyzed, plan, world=world) as engine:
            for _ in range(2):
                engine.step(engine.local_batch({key: value[:12] for key, value in token_samples().items()}))
            return engine.export(out), {
                name: value.clone() for name, value in engine.executor.gather_parameters().items()
            }

    return run_on_threads(rank, plan.mesh)[0]


def stirred_up(folder: Path, **lora: object) -> ExportableModel:
    """An adapted model on the stored base, whose trained parts are not at rest."""
    analyzed = adapted_reading(weights=folder, **lora)
    module = analyzed.deferred_init.instantiate()
    analyzed.deferred_init.materialize(module)
    held = dict(stirred(module).state_dict())
    return ExportableModel(analyzed.deferred_init, held.__getitem__)


@pytest.mark.parametrize("lora", [{}, {"modules_to_save": ["lm_head"]}], ids=["plain", "with a trained head"])
def test_the_adapter_is_complete_and_the_same_under_every_zero_stage(
    tmp_path: Path, folder: Path, lora: dict[str, object]
):
    analyzed = adapted_reading(weights=folder, **lora)
    alone, values = trained(analyzed, planned(analyzed, 1, "whole"), tmp_path / "alone")
    assert alone.round_trip.passed, str(alone.round_trip)
    assert alone.files == (CONFIG, ADAPTER_FILE)
    expected = load_file(tmp_path / "alone" / ADAPTER_FILE)
    assert all(tensor.numel() for tensor in expected.values())
    assert any("lora_B" in name and tensor.any() for name, tensor in expected.items())
    for store, ranks in (("whole", 2), (1, 3), (2, 2), (3, 2), (3, 3)):
        out = tmp_path / f"{store} on {ranks}"
        written, mine = trained(analyzed, planned(analyzed, ranks, store), out)
        assert written.round_trip.passed, str(written.round_trip)
        found = load_file(out / ADAPTER_FILE)
        assert {name: tensor.shape for name, tensor in found.items()} == {
            name: t.shape for name, t in expected.items()
        }
        for name, tensor in found.items():
            assert (tensor - expected[name]).abs().max() < 1e-12, name
        assert mine.keys() == values.keys()
        assert (out / CONFIG).read_text() == (tmp_path / "alone" / CONFIG).read_text()
    assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in expected


VARIANTS = [
    {},
    {"modules_to_save": ["lm_head"]},
    {"use_rslora": True, "bias": "all"},
    {"target_modules": ["embed_tokens", "q_proj"]},
]


@pytest.mark.parametrize("lora", [*VARIANTS, {"task_type": None}], ids=str)
def test_the_files_are_those_that_peft_writes(tmp_path: Path, folder: Path, lora: dict[str, object]):
    source = stirred_up(folder, **lora)
    written = export_model(source, tmp_path / "ours")
    assert written.round_trip.passed, str(written.round_trip)
    assert "the outputs for 2 x 8 tokens" in str(written.round_trip)
    model = source.deferred_init.instantiate()
    source.deferred_init.materialize(model)
    model.load_state_dict({name: source.read_value(name) for name in model.state_dict()})
    model.peft_config["default"].base_model_name_or_path = str(folder)
    model.save_pretrained(tmp_path / "theirs", save_embedding_layers=False)
    ours, theirs = (load_file(tmp_path / name / ADAPTER_FILE) for name in ("ours", "theirs"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    configs = [json.loads((tmp_path / name / CONFIG).read_text()) for name in ("ours", "theirs")]
    configs[1]["target_modules"] = sorted(configs[1]["target_modules"])  # peft has them in the order of a set
    assert configs[0] == configs[1]
    assert torch.equal(logits(of_peft(folder, tmp_path / "ours")), logits(model.eval()))


def test_a_narrower_dtype_is_written_and_measured(tmp_path: Path, folder: Path):
    written = export_model(stirred_up(folder), tmp_path / "out", torch.bfloat16)
    assert written.round_trip.passed
    assert 0 < written.round_trip.rounding_difference < 0.1
    assert {tensor.dtype for tensor in load_file(tmp_path / "out" / ADAPTER_FILE).values()} == {
        torch.bfloat16
    }


@pytest.mark.parametrize("lora", VARIANTS, ids=str)
def test_merged_it_is_a_model_that_needs_no_peft(tmp_path: Path, folder: Path, lora: dict[str, object]):
    source = stirred_up(folder, **lora)
    assert export_model(source, tmp_path / "adapter").round_trip.passed
    before = {name: source.read_value(name).clone() for name in source.deferred_init.logical_params}
    written = export_model(source, tmp_path / "whole", merge=True)
    assert written.round_trip.passed, str(written.round_trip)
    assert all(torch.equal(source.read_value(name), value) for name, value in before.items())
    whole = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "whole").eval()
    assert (logits(whole) - logits(of_peft(folder, tmp_path / "adapter"))).abs().max() < 1e-5


def test_a_module_of_anybody_is_compared_tensor_by_tensor(tmp_path: Path):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(3, 4), nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.two(self.one(x))

    print_ = defer_init(lambda: peft.get_peft_model(Net(), peft.LoraConfig(r=2, target_modules=["one"])), 0)
    written = export_model(
        ExportableModel(print_, print_.initial_value, adapter_base=str(tmp_path)), tmp_path / "out"
    )
    assert written.round_trip.passed
    assert "the tensors of the adapter" in str(written.round_trip)


def test_an_adapter_whose_base_is_nowhere_is_refused(tmp_path: Path, folder: Path):
    drawn = initial_model(defer_init(adapted(), 0))
    with pytest.raises(
        PlanError, match=r"its base has values from the seed, which are stored nowhere\n.*merge=True"
    ):
        export_model(drawn, tmp_path / "out")
    source = stirred_up(folder)
    with pytest.raises(PlanError, match=r"its base is not there any more: .*gone"):
        export_model(
            ExportableModel(source.deferred_init, source.read_value, adapter_base=str(tmp_path / "gone")),
            tmp_path / "out",
        )
    assert export_model(drawn, tmp_path / "merged", merge=True).round_trip.passed
    assert [path.name for path in tmp_path.iterdir()] == ["merged"]


def test_several_adapters_are_refused(tmp_path: Path):
    def two() -> nn.Module:
        model = adapted()()
        model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["q_proj"]))
        return model

    with pytest.raises(PlanError, match=r"the model holds 2 adapters \(default, other\)"):
        export_model(initial_model(defer_init(two, 0)), tmp_path / "out")


def test_an_adapter_that_changes_its_base_is_written_merged_only(tmp_path: Path, folder: Path):
    drawn = initial_model(defer_init(adapted(init_lora_weights="olora"), 0))
    assert not export_model(
        replace(drawn, adapter_base=str(folder)), tmp_path / "out"
    ).round_trip.passed  # peft would change the base again
    assert export_model(drawn, tmp_path / "merged", merge=True).round_trip.passed
    assert [path.name for path in tmp_path.iterdir()] == ["merged"]


def test_tokens_in_front_of_the_text_are_refused(tmp_path: Path):
    prompts = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    for merge in (False, True):
        with pytest.raises(PlanError, match=r"consists of prompt tokens, not of weights\n.*LoraConfig"):
            export_model(
                initial_model(defer_init(lambda: peft.get_peft_model(base(), prompts), 0)),
                tmp_path / "out",
                merge=merge,
            )


def test_a_model_without_an_adapter_cannot_be_merged(tmp_path: Path):
    with pytest.raises(PlanError, match="a Linear has no adapter that could be merged"):
        export_model(initial_model(defer_init(lambda: nn.Linear(2, 2), 0)), tmp_path / "out", merge=True)


def test_a_share_of_an_adapter_is_not_taken_for_the_adapter(tmp_path: Path, folder: Path):
    source = stirred_up(folder)

    def empty(name: str) -> torch.Tensor:
        return source.read_value(name).new_empty(0) if "lora_" in name else source.read_value(name)

    with pytest.raises(PlanError, match=r"is \[0\] here and \[3, 16\] in the model"):
        export_model(ExportableModel(source.deferred_init, empty), tmp_path / "out")


def test_a_tensor_that_is_written_wrongly_is_noticed(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    usual = adapter_export.write_shard
    monkeypatch.setattr(
        adapter_export,
        "write_shard",
        lambda path, tensors: usual(
            path, {n: t.roll(1) if "q_proj.lora_B" in n else t for n, t in tensors.items()}
        ),
    )
    assert not export_model(stirred_up(folder), tmp_path / "out").round_trip.passed
    assert list(tmp_path.iterdir()) == []


FACTORY = (
    "from tests.model.hf.lora_models import adapted\n\n\ndef build():\n    return "
    "adapted({'vocab_size': 256})()\n"
)


def test_a_run_on_shards_leaves_as_an_adapter_and_as_a_whole_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    stored_base(tmp_path / "base", vocab_size=256)
    (tmp_path / "model.py").write_text(FACTORY)
    model = {"source": str(tmp_path / "model.py:build"), "weights": str(tmp_path / "base")}
    ready = resolve_config(
        lay_out(tmp_path / "job", model=model, mesh={"dp_shard": 2}, optimizer={"lr": 0.1}), [], None
    )[1]

    def rank(world: World) -> None:
        with parallelize(ready.analyzed, ready.plan, loss=ready.loss, world=world) as engine:
            engine.step(ready.local_batches(ready.plan, world.rank).batch(0))
            save_run_checkpoint(engine.executor, ready.plan, world, ready.dataset.digest)

    run_on_threads(rank, ready.plan.mesh)
    code, out, err = invoke(capsys, "export", tmp_path / "job" / "run", tmp_path / "adapter")
    assert (code, err) == (0, "")
    assert "adapter_config.json, adapter_model.safetensors" in out
    assert "round trip  the outputs for 2 x 8 tokens differ by" in out
    code, out, err = invoke(capsys, "export", tmp_path / "job" / "run", tmp_path / "whole", "--merge")
    assert (code, err) == (0, "")
    whole = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "whole").eval()
    theirs = peft.AutoPeftModelForCausalLM.from_pretrained(
        tmp_path / "adapter"
    ).eval()  # finds the base by itself
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base").eval()
    assert (logits(whole) - logits(theirs)).abs().max() < 1e-5 < (logits(plain) - logits(theirs)).abs().max()


def test_adam_keeps_moments_of_adapters_only(folder: Path):
    analyzed = adapted_reading(weights=folder)
    plan = planned(analyzed, 2, 3, optimizer=OptimizerConfig("adamw", lr=0.1))
    names = {weight.name for weight in plan.model_spec.trainable}

    def rank(world: World) -> set[str]:
        with parallelize(analyzed, plan, world=world) as engine:
            engine.step(engine.local_batch({key: value[:12] for key, value in token_samples().items()}))
            return {
                name.split("/", 2)[2]
                for name in engine.executor.state_dict()
                if name.startswith("optimizer/exp_avg/")
            }

    assert set().union(*run_on_threads(rank, plan.mesh)) == names
