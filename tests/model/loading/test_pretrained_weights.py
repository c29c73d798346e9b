"""Weights in a folder as initial values of a model: matching names, refusals, and memory while reading."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from meshwright.model.loading.loader import load_factory, with_weights
from meshwright.model.loading.pretrained_weights import find_weights
from meshwright.model.loading.safetensors_reader import SINGLE_FILE
from meshwright.plan.job.errors import PlanError
from tests.model.published_models import FAMILIES, load_published, logits, made, published


def edited(folder: Path, change) -> Path:
    """`folder` with other tensors: `change` edits the dict of all of them in place."""
    tensors = load_file(folder / SINGLE_FILE)
    change(tensors)
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        folder / SINGLE_FILE,
        metadata={"format": "pt"},
    )
    return folder


def refusal(folder: Path, **fields: object) -> str:
    with pytest.raises(PlanError) as caught:
        load_published(folder, **fields)
    return str(caught.value)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_transformers_wrote_gives_its_logits(tmp_path: Path, family: str):
    theirs = published(tmp_path, family)
    assert torch.equal(logits(made(load_published(tmp_path))), logits(theirs))


def test_values_are_stored_ones_and_not_those_of_the_seed(tmp_path: Path):
    theirs = published(tmp_path)
    deferred = load_published(tmp_path).deferred_init
    assert torch.equal(deferred.initial_value("lm_head.weight"), theirs.lm_head.weight)
    assert torch.equal(
        deferred.initial_value("lm_head.weight", torch.bfloat16), theirs.lm_head.weight.bfloat16()
    )


def test_a_base_model_s_weights_fit_the_model_round_it(tmp_path: Path):
    theirs = published(tmp_path, "gpt2")

    def bare(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)

    assert torch.equal(logits(made(load_published(edited(tmp_path, bare)))), logits(theirs))


def test_one_name_of_a_tie_is_enough_whichever_it_is(tmp_path: Path):
    theirs = published(tmp_path, "gpt2")

    def renamed(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors.pop("transformer.wte.weight")

    module = made(load_published(edited(tmp_path, renamed)))
    assert module.lm_head.weight is module.transformer.wte.weight
    assert torch.equal(logits(module), logits(theirs))


def test_both_names_of_a_tie_must_be_equal(tmp_path: Path):
    theirs = published(tmp_path, "gpt2")
    edited(
        tmp_path,
        lambda tensors: tensors.update({"lm_head.weight": tensors["transformer.wte.weight"].clone()}),
    )
    assert torch.equal(logits(made(load_published(tmp_path))), logits(theirs))
    edited(tmp_path, lambda tensors: tensors["lm_head.weight"].add_(1))
    said = refusal(tmp_path)
    assert "lm_head.weight are one parameter in the model, and are stored with different values" in said
    assert "tie_word_embeddings = false" in said


def test_buffers_that_are_computed_are_left_in_the_file(tmp_path: Path):
    theirs = published(tmp_path)
    old = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4),
        "model.rotary_emb.inv_freq": torch.zeros(4),
    }
    module = made(load_published(edited(tmp_path, lambda tensors: tensors.update(old))))
    assert torch.equal(logits(module), logits(theirs))


def test_everything_that_does_not_fit_is_named_at_once(tmp_path: Path):
    published(tmp_path)

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.norm.weight"], tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["model.layers.0.mlp.extra.weight"] = torch.ones(3)
        tensors["lm_head.weight"] = torch.ones(41, 16)

    said = refusal(edited(tmp_path, spoil))
    assert "2 tensors of the model are missing in the weights" in said
    assert "model.layers.1.mlp.up_proj.weight, model.norm.weight" in said
    assert "1 stored tensors belong to no parameter of the model: model.layers.0.mlp.extra.weight" in said
    assert "lm_head.weight is [41, 16], the model needs [40, 16]" in said
    assert 'model.skip = ["model.layers.0.mlp.extra.*"]' in said


def test_a_repair_leaves_out_no_more_than_what_does_not_fit(tmp_path: Path):
    published(tmp_path)
    gone, spare = "model.layers.1.self_attn.q_proj.weight", "model.layers.0.mlp.up_proj.bias"
    edited(tmp_path, lambda tensors: tensors.update({spare: torch.ones(3)}) or tensors.pop(gone))
    said = refusal(tmp_path)
    assert f'model.skip = ["{spare}"]' in said
    assert 'model.skip = ["model.layers.1.self_attn.q_proj.*"]' in said
    edited(
        tmp_path,
        lambda tensors: tensors.update(
            {f"model.layers.{i}.norm{j}.weight": torch.ones(1) for i in "01" for j in "abc"}
        ),
    )
    assert '"model.*"' not in refusal(tmp_path)


def test_hundreds_of_names_are_cut(tmp_path: Path):
    published(tmp_path)
    said = refusal(
        edited(tmp_path, lambda tensors: tensors.update({f"x.{i}": torch.ones(1) for i in range(300)}))
    )
    assert "300 stored tensors belong to no parameter" in said
    assert "and 292 more" in said
    assert len(said) < 1000


def test_an_expert_of_another_shape_or_none_at_all_is_named(tmp_path: Path):
    published(tmp_path, "mixtral")

    def narrow(tensors: dict[str, torch.Tensor]) -> None:
        name = next(name for name in tensors if re.search(r"layers\.1.*experts\.2\.w1", name))
        tensors[name] = tensors[name][:-1]

    assert "cannot become model.layers.1.mlp.experts.gate_up_proj" in refusal(edited(tmp_path, narrow))
    published(tmp_path, "mixtral")

    def fewer(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if re.search(r"layers\.1.*experts\.3\.", name)]:
            del tensors[name]

    assert "model.layers.1.mlp.experts.gate_up_proj is [3, 48, 16], the model needs [4, 48, 16]" in refusal(
        edited(tmp_path, fewer)
    )


def test_what_is_skipped_starts_from_the_seed_or_stays_unread(tmp_path: Path):
    theirs = published(tmp_path)
    edited(
        tmp_path,
        lambda tensors: tensors.update({"spare.weight": torch.ones(2)}) or tensors.pop("lm_head.weight"),
    )
    deferred = load_published(tmp_path, skip=("lm_head.*", "spare.*")).deferred_init
    assert deferred.initial_value("lm_head.weight").std().item() == pytest.approx(0.02, rel=0.3)
    assert not torch.equal(deferred.initial_value("lm_head.weight"), theirs.lm_head.weight)
    assert torch.equal(deferred.initial_value("model.norm.weight"), theirs.model.norm.weight)


def test_skip_forgives_another_shape(tmp_path: Path):
    published(tmp_path)
    deferred = load_published(
        tmp_path, overrides={"vocab_size": 44}, skip=("lm_head.*", "model.embed_tokens.*")
    ).deferred_init
    assert deferred.initial_value("lm_head.weight").shape == (44, 16)


def test_a_module_of_anybody_takes_weights_under_its_own_names(tmp_path: Path):
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    net[1].running_mean.fill_(2.5)
    save_file(dict(net.state_dict()), tmp_path / "net.safetensors")
    plain = load_factory(lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)), 0, "net")
    module = made(with_weights(plain, tmp_path / "net.safetensors"))
    x = torch.randn(5, 3)
    assert torch.equal(module(x), net.eval()(x))


def test_rows_of_an_expert_are_read_without_the_other_experts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    theirs = published(tmp_path, "mixtral")
    loaded = load_published(tmp_path)
    weights = find_weights(
        tmp_path,
        loaded.deferred_init.instantiate(),
        {name: e.aliases for name, e in loaded.deferred_init.logical_params.items()},
    )
    name = "model.layers.0.mlp.experts.gate_up_proj"
    asked = []
    native = weights._read_stored
    monkeypatch.setattr(weights, "_read_stored", lambda stored: asked.append(stored) or native(stored))
    found = weights.read(name, torch.float32, rows=range(1, 3))
    assert torch.equal(found, theirs.get_parameter(name)[1:3])
    assert {re.search(r"experts\.(\d)\.", stored)[1] for stored in asked} == {"1", "2"}
    assert torch.equal(weights.read("lm_head.weight", rows=range(30, 40)), theirs.lm_head.weight[30:40])


def test_the_pretrained_source_gives_size_digest_and_read_buffer(tmp_path: Path):
    theirs = published(tmp_path, "mixtral")
    origin = load_published(tmp_path).deferred_init.pretrained_source
    fused = theirs.model.layers[0].mlp.experts.gate_up_proj
    assert origin.nbytes == sum(parameter.numel() * 4 for parameter in theirs.parameters())
    assert origin.read_buffer_nbytes == 2 * fused.numel() * 4  # its parts, and what they are joined to
    assert origin.source == str(tmp_path)
    published(tmp_path / "other", "mixtral", seed=4)
    assert load_published(tmp_path / "other").deferred_init.pretrained_source.digest != origin.digest


def test_a_tokenizer_beyond_the_vocabulary_is_refused(tmp_path: Path):
    published(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 40}]}')
    assert "has ids up to 40, and the model has 40 tokens" in refusal(tmp_path)


def test_quantised_weights_are_refused(tmp_path: Path):
    published(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps(config | {"quantization_config": {"quant_method": "fp8"}})
    )
    assert "says that its weights are quantized" in refusal(tmp_path)
