"""Choosing a plan: from sizes or a config to a ranked table and a config that resolves; what is refused, and how."""

import json
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from transformers import GPT2Config, LlamaConfig, ViTConfig

from meshwright.core.errors import PlanError
from meshwright.report.choice import Budget
from meshwright.run.config import read_request
from meshwright.strategies import STRATEGIES
from meshwright.verbs.choose import Asked, as_dict, choose, config_of_choice, shape_of, view, write_config

SMALL = "small: layers 24 hidden 2048 heads 16 gated vocab 32000"


def shown(asked: Asked) -> str:
    file = StringIO()
    Console(width=240, file=file).print(view(choose(asked)))
    return file.getvalue()


def test_a_model_in_words_is_planned_and_explained():
    text = shown(Asked(SMALL, 8, "a100", 64, budget=Budget(1e9, 2.0)))
    assert "1.74 B weights on 8 A100" in text
    assert "Everything fits on each device" in text
    assert "wins: " in text
    assert "takes" in text
    assert "1e+09 tokens take" in text
    assert "of which waiting" in text
    assert "Its fullest device holds" in text


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("13b: layers 40 hidden 5120 heads 40", "The model does not fit on a device"),
        ("odd: layers 4 hidden 81920 heads 640", "Not even a layer with its output and its optimizer's states fits"),
    ],
)
def test_the_scenario_is_said_in_words(model: str, words: str):
    assert words in shown(Asked(model, 512, "a100", 512))


def test_a_config_is_read_and_its_model_counted(tmp_path: Path):
    config = LlamaConfig(
        hidden_size=96, intermediate_size=200, num_attention_heads=6, num_key_value_heads=2, num_hidden_layers=3, vocab_size=130
    )
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path)
    shape = shape_of(str(tmp_path), 512)
    assert (shape.layers, shape.hidden, shape.heads, shape.groups, shape.inner) == (3, 96, 6, 2, 200)
    assert (shape.vocab, shape.sequence, shape.gated, shape.tied) == (130, 512, True, False)


def test_a_config_of_another_family_has_its_sizes_under_its_own_names(tmp_path: Path):
    config = GPT2Config(n_embd=48, n_head=4, n_layer=2, vocab_size=77, n_positions=64)
    config.architectures = ["GPT2LMHeadModel"]
    config.save_pretrained(tmp_path)
    shape = shape_of(str(tmp_path), 0)
    assert (shape.layers, shape.hidden, shape.sequence, shape.gated, shape.tied) == (2, 48, 64, False, True)


def test_the_winner_is_a_config_that_resolves(tmp_path: Path):
    chosen = choose(Asked("13b: layers 40 hidden 5120 heads 40", 64, "a100", 128, fixed=("tp=4", "pp=2")))
    best = chosen.found.best[0].layout
    assert (best.tp, best.pp) == (4, 2)
    path = tmp_path / "plan.toml"
    write_config(chosen, path)
    path.write_text(path.read_text() + '\n[model]\nsource = "a"\n')
    request = read_request(path, ["--data.source", "b"], STRATEGIES)
    assert (request.mesh["tp"], request.mesh["pp"]) == (4, 2)
    assert {"pipeline", "line", "sequence", "vocabulary"} <= {strategy.name for strategy in request.strategies or ()}
    assert request.job.train.batch == 128
    assert request.job.precision.compute == best.dtype == "bfloat16"
    assert request.micro_batch == best.micro_batch


def test_what_is_shown_is_there_as_plain_values():
    chosen = choose(Asked(SMALL, 8, "h100", 64, budget=Budget(1e12, 3.0)))
    said = json.loads(json.dumps(as_dict(chosen)))
    first = said["layouts"][0]
    assert first["step_s"] == pytest.approx(sum(first["seconds"].values()))
    assert first["days"] == pytest.approx(1e12 / first["tokens_per_s"] / 86400)
    assert first["cost"] == pytest.approx(first["days"] * 24 * 8 * 3.0)
    assert 0 < first["mfu"] < 1
    assert len(config_of_choice(chosen)["strategies"]) >= 1


def test_what_fits_nowhere_is_told_with_what_is_missing():
    with pytest.raises(PlanError) as raised:
        choose(Asked("175b: layers 96 hidden 12288 heads 96", 8, "v100", 64))
    text = str(raised.value)
    assert "nothing fits: 175b needs" in text
    assert "V100 has" in text
    assert "more devices (about" in text


def test_all_that_contradicts_itself_is_told_at_once():
    with pytest.raises(PlanError) as raised:
        choose(Asked(SMALL, 8, "a100", 64, fixed=("tp", "pp=3")))
    assert "'tp' fixes nothing" in str(raised.value)
    assert "pp 3 on 8 devices" in str(raised.value)


def test_a_batch_that_no_copies_can_share_is_told():
    with pytest.raises(PlanError, match="no mesh of 8 devices takes 7 rows"):
        choose(Asked(SMALL, 8, "a100", 7, fixed=("dp=8",)))


def test_a_model_whose_sizes_are_not_those_of_a_text_model_is_refused(tmp_path: Path):
    config = ViTConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
    config.architectures = ["ViTForImageClassification"]
    config.save_pretrained(tmp_path)
    with pytest.raises(PlanError, match="does not say vocab_size, max_position_embeddings"):
        shape_of(str(tmp_path), 0)
