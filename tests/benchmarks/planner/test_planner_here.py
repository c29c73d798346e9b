"""The twelve plans of `planner_here` are mixed and small, and the planner predicts their time."""

from benchmarks.planner.twelve_plans import CASES, analyze_and_plan, batch_of, config_of
from meshwright.planner.program_cost.prediction import predict_step
from tests.planner.simple_machine import ground


def test_twelve_plans_mix_families_and_techniques_on_two_to_four_ranks():
    assert len(CASES) == 12
    assert {case.family for case in CASES.values()} == {"llama", "gpt2", "bert", "t5"}
    assert {case.mesh.world_size for case in CASES.values()} == {2, 4}
    names = {strategy.name for case in CASES.values() for strategy in case.strategies}
    assert {
        "ddp",
        "zero",
        "tensor_parallel",
        "pipeline",
        "ring",
        "ulysses",
        "activation_checkpointing",
    } <= names


def test_an_encoder_decoder_with_activation_checkpointing_has_a_predicted_time():
    _, plan = analyze_and_plan(CASES["t5, ddp on 2, activation_checkpointing"])
    found = predict_step(plan, ground(flops=1e11, moved=1e10, links=1e9))
    assert 10e6 < plan.model_spec.numel < 50e6
    assert found.step_s > found.flops / 2 / 1e11  # each rank has half of the samples, and recomputes blocks


def test_models_have_no_dropout_so_that_steps_are_alike():
    for family in ("gpt2", "bert", "t5"):
        fields = config_of(family)[1].to_dict()
        assert not any(
            value for key, value in fields.items() if key.endswith(("pdrop", "dropout_rate", "dropout_prob"))
        )
    assert set(batch_of("t5")) == {"input_ids", "labels", "decoder_input_ids"}
