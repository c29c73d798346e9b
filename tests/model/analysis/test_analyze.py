"""Analysis of a user's model: the model spec, what the analysis costs, and refusals."""

import json
import resource
from pathlib import Path

import pytest
import torch
from torch import nn

from meshwright.model.analysis.analyze import analyze
from meshwright.model.blocks.discovery import WHOLE_MODEL
from meshwright.model.loading.loader import Model, load_factory, load_model
from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.model_config import ModelConfig
from tests.model.block_backward import analyze_model, both_ways
from tests.model.unknown_loss import unknown_loss

X = {"x": torch.linspace(-1, 1, 12).view(2, 6)}


class Plain(nn.Module):
    """Two linears without a chain; `p` is the dropout between them, and `rule` a forward that replaces this
    one.
    """

    def __init__(self, p: float = 0.0, rule: object = None) -> None:
        super().__init__()
        self.first, self.drop, self.second, self.rule = nn.Linear(6, 6), nn.Dropout(p), nn.Linear(6, 3), rule

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.first(x).tanh())
        return self.second(x if self.rule is None else self.rule(self, x))


class Chained(nn.Module):
    """A chain of three linears that `rule` runs."""

    def __init__(self, rule: object) -> None:
        super().__init__()
        self.layers, self.rule = nn.ModuleList(nn.Linear(6, 6) for _ in range(3)), rule

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rule(self, x)


def test_a_model_without_a_chain_runs_as_one_block_with_a_warning():
    done = both_ways(Plain, X)
    assert done.error < 1e-14
    assert done.block_calls == [WHOLE_MODEL] == list(done.analyzed.model_spec.block_calls)
    assert done.analyzed.model_spec.notes == (
        "no chain of blocks was found: the model runs as one block, so nothing overlaps with its backward",
    )


def test_a_chain_of_which_only_submodules_are_called_runs_as_one_block():
    def rule(model: Chained, x: torch.Tensor) -> torch.Tensor:
        for layer in model.layers:
            x = nn.functional.linear(x, layer.weight, layer.bias)
        return x

    done = both_ways(lambda: Chained(rule), X)
    assert done.block_calls == [WHOLE_MODEL]
    assert done.error < 1e-14
    assert {weight.block_calls for weight in done.analyzed.model_spec.params} == {(WHOLE_MODEL,)}


def test_parameters_in_glue_and_written_buffers_are_noted():
    class Noted(Chained):
        def __init__(self) -> None:
            super().__init__(
                lambda model, x: nn.functional.linear(model.layers[0](x), model.layers[1].weight)
            )
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count += 1
            return super().forward(x)

    analyzed = analyze_model(Noted, X)
    assert analyzed.written_buffers == ("count",)
    assert analyzed.model_spec.notes == (
        "4 parameters are used outside blocks (layers.1.weight...): complete after the last backward",
        "1 buffers are written by the forward (count...): every rank writes its own",
    )


@pytest.mark.parametrize(
    "look",
    [
        lambda model, x: x * x.abs().max().item(),
        lambda model, x: x * x[x > 0].mean(),
        lambda model, x: x * float(x.detach().numpy()[0, 0]),
    ],
)
def test_a_forward_that_reads_values_is_run_on_real_tensors(look: object):
    done = both_ways(lambda: Chained(lambda model, x: model.layers[1](look(model, model.layers[0](x)))), X)
    assert done.block_calls == ["layers.0", "layers.1"]
    assert done.error < 1e-14
    assert done.analyzed.model_spec.flops == (72, 72)


def test_an_error_in_a_forward_that_reads_values_is_the_models_own():
    def rule(model: Chained, x: torch.Tensor) -> torch.Tensor:
        if x.sum().item() != 0:
            raise KeyError("nothing for these values")
        return x

    with pytest.raises(
        PlanError,
        match=r"fails in a trial on samples like x \[2, 6\] float32: "
        r"KeyError: 'nothing for these values'",
    ):
        analyze_model(lambda: Chained(rule), X)


def test_an_example_that_does_not_fit_the_forward_is_refused_with_its_shapes():
    with pytest.raises(PlanError) as caught:
        analyze(
            load_factory(Plain, 0, "plain"),
            {"x": torch.zeros(2, 5), "labels": torch.zeros(2)},
            unknown_loss("labels"),
        )
    assert "the forward fails in a trial on samples like x [2, 5] float32: RuntimeError: " in str(
        caught.value
    )
    with pytest.raises(
        PlanError,
        match=r"batch\.y: the forward of Plain takes x, and the batch has 'y'\n"
        r"  repair: give it the name of an argument: choose one of: x",
    ):
        analyze(load_factory(Plain, 0, "plain"), {"y": torch.zeros(2, 6)}, unknown_loss())


@pytest.mark.parametrize(
    ("example", "given"),
    [
        ({}, "no tensors"),
        ({"x": torch.zeros(0, 6)}, r"x of shape \[0, 6\]"),
        ({"x": torch.zeros(2, 6), "labels": torch.zeros(3)}, r"x of shape \[2, 6\], labels of shape \[3\]"),
        ({"x": torch.zeros(2, 6), "step": torch.zeros(())}, r"step of shape \[\]"),
    ],
)
def test_an_example_without_a_common_batch_size_is_refused(example: dict[str, torch.Tensor], given: str):
    with pytest.raises(
        PlanError,
        match=rf"^example: the example batch holds .*{given}.*; needed is the same number of samples",
    ):
        analyze(load_factory(Plain, 0, "plain"), example, unknown_loss())


def test_the_stand_in_sample_is_detached_from_the_examples_graph():
    x = torch.ones(1, 6, requires_grad=True)
    analyzed = analyze_model(Plain, {"x": (x * 2).expand(4, 6)})
    assert analyzed.example["x"].shape == (1, 6)
    assert analyzed.example["x"].grad_fn is None
    assert x.grad is None


def test_dropout_is_found_and_the_analysis_does_not_advance_the_generator():
    state = torch.get_rng_state()
    assert analyze_model(lambda: Plain(0.5), X).model_spec.has_dropout
    assert not analyze_model(Plain, X).model_spec.has_dropout
    assert torch.equal(torch.get_rng_state(), state)


def test_a_submodule_in_eval_mode_stays_so_and_a_model_in_eval_mode_trains():
    def part() -> nn.Module:
        model = Plain(0.5)
        model.drop.eval()
        return model

    module, _, _ = analyze_model(part, X).make_module("cpu", torch.float32)
    assert [module.training, module.drop.training] == [True, False]
    assert not analyze_model(part, X).model_spec.has_dropout
    analyzed = analyze_model(lambda: Plain(0.5).eval(), X)
    assert analyzed.model_spec.has_dropout
    assert all(inner.training for inner in analyzed.make_module("cpu", torch.float32)[0].modules())


def test_instances_are_independent_and_start_equal():
    analyzed = analyze_model(Plain, X)
    one, blocks, parameters = analyzed.make_module("cpu", torch.float64)
    other, _, _ = analyzed.make_module("cpu", torch.float64)
    assert blocks == {WHOLE_MODEL: one}
    assert list(parameters) == ["first.weight", "first.bias", "second.weight", "second.bias"]
    assert all(parameters[name] is one.get_parameter(name) for name in parameters)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    assert {id(p) for p in one.parameters()}.isdisjoint({id(p) for p in other.parameters()})


def test_declared_blocks_take_precedence_over_discovery():
    analyzed = analyze(
        load_factory(lambda: Model(Plain(), X, blocks=["second"]), 0, "plain"), X, unknown_loss()
    )
    assert analyzed.model_spec.block_calls == ("second",)
    assert {w.name: w.block_calls for w in analyzed.model_spec.params}["first.weight"] == ("(root)",)


def test_declared_blocks_that_no_forward_calls_are_refused():
    def rule(model: Chained, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            x = model.layers[0](x)
        return nn.functional.linear(model.layers[1](x), model.layers[2].weight)

    blocks = ["layers.0", "layers.1", "layers.2"]
    with pytest.raises(
        PlanError,
        match=r"^model\.blocks: the declared blocks layers\.0, layers\.2 are not called(?s:.*)every batch",
    ):
        analyze(load_factory(lambda: Model(Chained(rule), X, blocks=blocks), 0, "chained"), X, unknown_loss())


def test_the_whole_model_may_be_declared_as_one_block():
    analyzed = analyze(
        load_factory(lambda: Model(Plain(), X, blocks=[WHOLE_MODEL]), 0, "plain"), X, unknown_loss()
    )
    assert analyzed.model_spec.block_calls == (WHOLE_MODEL,)
    assert analyzed.model_spec.notes == ()


def test_two_batch_sizes_tell_the_batch_dim_of_what_is_drawn_from_others():
    class Drawing(Chained):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.view(len(x), 3, 2).transpose(0, 1)
            x = nn.functional.dropout(x, 0.5)  # (3, batch, 2)
            bias = nn.functional.dropout(self.layers[0].weight, 0.5)  # (6, 6)
            x = nn.functional.dropout(self.layers[1](x.transpose(0, 1).flatten(1)), 0.5)  # (batch, 6)
            return nn.functional.dropout((x @ bias).view(-1, 2), 0.5)  # (3 batch, 2)

    sites = analyze_model(lambda: Drawing(None), X).draw_sites
    assert [sites.layout(site) for site in sites.layouts] == ["dim1", "shared", "dim0", "flattened"]


def test_a_model_of_six_billion_parameters_is_analyzed_in_the_memory_of_a_small_one(tmp_path: Path):
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = tmp_path / "config.json"
    config.write_text(
        json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 256, **sizes})
    )
    samples = {key: torch.zeros(1, 64, dtype=torch.long) for key in ("input_ids", "labels")}
    analyze(load_model(ModelConfig(str(config)), 0), samples, unknown_loss("labels"))
    before = peak_mb()
    large = {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 6,
        "num_attention_heads": 64,
    }
    large |= {"num_key_value_heads": 64, "vocab_size": 32000}
    model_spec = analyze(
        load_model(ModelConfig(str(config), large), 0), samples, unknown_loss("labels")
    ).model_spec
    assert model_spec.numel == 6_362_865_664
    assert len(model_spec.block_calls) == 6 + 3
    assert peak_mb() - before < 64  # its embedding alone would take 1000


def test_a_mixture_of_experts_of_many_gigabytes_is_analyzed_without_values(tmp_path: Path):
    config = tmp_path / "config.json"
    sizes = {"num_hidden_layers": 2, "first_k_dense_replace": 1, "vocab_size": 256}
    config.write_text(
        json.dumps({"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], **sizes})
    )
    samples = {key: torch.zeros(1, 16, dtype=torch.long) for key in ("input_ids", "labels")}
    before = peak_mb()
    model_spec = analyze(load_model(ModelConfig(str(config)), 0), samples, unknown_loss("labels")).model_spec
    assert model_spec.numel > 12e9
    assert len(model_spec.block_calls) == 2 + 3
    assert peak_mb() - before < 512


def peak_mb() -> float:
    """The most memory that this process has held at any time, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
