"""The checks of `compiled_parity`: all models have dropout, and what differs is told from a refusal."""

from benchmarks.models.compiled_parity import BAR, PROBABILITY, check_model, fields_with_dropout, worst_error
from benchmarks.models.head_families import ALL_HEADS, Head


def head_named(name: str) -> Head:
    (head,) = [head for head in ALL_HEADS if head.name == name]
    return head


def test_configs_without_dropout_get_it_and_no_layer_is_left_out():
    assert len(ALL_HEADS) >= BAR
    for name in ("LlamaForCausalLM", "ViTForImageClassification", "WhisperForConditionalGeneration"):
        head = head_named(name)
        config = type(head.build().config)(**fields_with_dropout(name, head.config)).to_dict()
        values = {key: value for key, value in config.items() if "drop" in key}
        assert all(bool(value) != ("layerdrop" in key) for key, value in values.items()), values
    clip = fields_with_dropout("CLIPModel", head_named("CLIPModel").config)
    assert clip["text_config"]["attention_dropout"] == PROBABILITY
    mixture = head_named("MixtralForCausalLM")
    assert not fields_with_dropout(mixture.architecture, mixture.config)["output_router_logits"]


def test_a_refused_plan_is_told_from_one_that_fails():
    row = check_model(head_named("ResNetForImageClassification"), ["tp 2"])
    assert "a convolution: only linear layers" in row["plans"]["tp 2"]["refused"]
    row["plans"]["one device"] = {"error": 3e-15, "graphs": 4}
    assert worst_error(row) == 3e-15
    row["plans"]["pp 2"] = {"failed": "by a factor"}
    assert worst_error(row) == float("inf")
