"""A transformers config becomes a factory: fields that take effect, fields that do not, and refusals."""

import json
from pathlib import Path

import pytest
import torch

from meshwright.model.hf.model_from_config import config_factory, read_config
from meshwright.plan.job.errors import PlanError

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": 50,
    "torch_dtype": "bfloat16",
    "use_cache": True,
}


def written(folder: Path, config: object) -> str:
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return str(folder)


def test_a_folder_and_a_file_name_the_same_model(tmp_path: Path):
    folder = written(tmp_path, LLAMA)
    shapes = [
        [p.shape for p in config_factory(s, {})().parameters()] for s in (folder, f"{folder}/config.json")
    ]
    assert shapes[0] == shapes[1]


def test_parameters_are_float32(tmp_path: Path):
    module = config_factory(written(tmp_path, LLAMA), {})()
    assert type(module).__name__ == "LlamaForCausalLM"
    assert {p.dtype for p in module.parameters()} == {torch.float32}


def test_a_config_is_read_without_a_model(tmp_path: Path):
    folder = written(
        tmp_path, LLAMA | {"architectures": ["NoSuchModel"], "auto_map": {"AutoConfig": "code.Config"}}
    )
    assert read_config(folder).num_hidden_layers == 3
    with pytest.raises(PlanError, match="the architecture 'NoSuchModel' is not known"):
        config_factory(folder, {})
    with pytest.raises(PlanError, match="the model type 'lllama' is not known"):
        read_config(written(tmp_path, LLAMA | {"model_type": "lllama"}))


def test_without_an_architecture_it_is_the_causal_language_model(tmp_path: Path):
    module = config_factory(written(tmp_path, {k: v for k, v in LLAMA.items() if k != "architectures"}), {})()
    assert type(module).__name__ == "LlamaForCausalLM"
    assert {p.dtype for p in module.parameters()} == {torch.float32}


def test_the_architecture_chooses_the_class(tmp_path: Path):
    config = LLAMA | {"architectures": ["LlamaForSequenceClassification"]}
    assert type(config_factory(written(tmp_path, config), {})()).__name__ == "LlamaForSequenceClassification"


def test_overrides_replace_fields_and_what_follows_from_them(tmp_path: Path):
    module = config_factory(written(tmp_path, LLAMA), {"num_hidden_layers": 1, "hidden_size": 64})()
    assert len(module.model.layers) == 1
    assert module.model.layers[0].self_attn.head_dim == 16


def test_overrides_understand_the_aliases_of_a_config(tmp_path: Path):
    config = {
        "model_type": "gpt2",
        "n_embd": 16,
        "n_layer": 3,
        "n_head": 2,
        "vocab_size": 30,
        "bos_token_id": 1,
        "eos_token_id": 1,
    }
    folder = written(tmp_path, config)
    for name in ("num_hidden_layers", "n_layer"):
        assert len(config_factory(folder, {name: 2})().transformer.h) == 2


@pytest.mark.parametrize(
    ("layers", "layer_types"), [(1, ["sliding_attention"]), (2, ["sliding_attention", "full_attention"])]
)
def test_a_list_with_an_item_per_layer_follows_the_number_of_layers(
    tmp_path: Path, layers: int, layer_types: list[str]
):
    config = LLAMA | {
        "model_type": "gemma2",
        "architectures": ["Gemma2ForCausalLM"],
        "num_key_value_heads": 2,
    }
    config["layer_types"] = ["sliding_attention", "full_attention", "sliding_attention"]
    assert (
        config_factory(written(tmp_path, config), {"num_hidden_layers": layers})().config.layer_types
        == layer_types
    )
    assert len(config_factory(written(tmp_path, config), {"num_hidden_layers": 4})().config.layer_types) == 4


def test_code_from_a_repository_is_never_run(tmp_path: Path):
    config = {k: v for k, v in LLAMA.items() if k != "architectures"} | {
        "auto_map": {"AutoModelForCausalLM": "evil.Evil"}
    }
    (tmp_path / "evil.py").write_text("raise SystemExit")
    assert type(config_factory(written(tmp_path, config), {})()).__module__.startswith("transformers.")


@pytest.mark.parametrize("number", [0, 4])
def test_more_chosen_experts_than_there_are_or_none_are_refused(tmp_path: Path, number: int):
    path = written(tmp_path, {"model_type": "mixtral", "num_local_experts": 3})
    with pytest.raises(
        PlanError, match=rf"chooses num_experts_per_tok = {number} of num_local_experts = 3"
    ) as caught:
        config_factory(path, {"num_experts_per_tok": number})
    assert caught.value.diagnostics[0].fix.startswith("set num_experts_per_tok from 1 to 3")
    config_factory(path, {"num_experts_per_tok": 3})


def test_unknown_overrides_are_refused_together_with_the_nearest(tmp_path: Path):
    with pytest.raises(PlanError) as caught:
        config_factory(written(tmp_path, LLAMA), {"num_hiden_layers": 1, "vocab": 2, "use_cache": True})
    diagnostics = caught.value.diagnostics
    assert [diagnostic.location for diagnostic in diagnostics] == [
        f"model.overrides.{name}" for name in ("num_hiden_layers", "vocab", "use_cache")
    ]
    assert diagnostics[0].fix == "did you mean 'num_hidden_layers'?"


@pytest.mark.parametrize(
    ("config", "what", "fix"),
    [
        ("{", "cannot be read as JSON", "correct the file"),
        ("[]", "holds a list; a config is an object", "transformers config.json"),
        ({"hidden_size": 3}, "has no model_type", 'for example "llama"'),
        ({"model_type": "llamma"}, "the model type 'llamma' is not known", "did you mean 'llama'?"),
        (
            LLAMA | {"architectures": ["LlamaForCausal"]},
            "architecture 'LlamaForCausal' is not known",
            "'LlamaForCausalLM'?",
        ),
        (LLAMA | {"hidden_size": "wide"}, "transformers refuses the config", "change the field"),
    ],
)
def test_a_config_that_cannot_work_is_refused(tmp_path: Path, config: object, what: str, fix: str):
    with pytest.raises(PlanError) as caught:
        config_factory(written(tmp_path, config), {})
    assert what in caught.value.diagnostics[0].problem
    assert fix in caught.value.diagnostics[0].fix


def test_a_missing_config_is_refused(tmp_path: Path):
    with pytest.raises(PlanError, match=r"there is no file .*config\.json"):
        config_factory(str(tmp_path), {})
