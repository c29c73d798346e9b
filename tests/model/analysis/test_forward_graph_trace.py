"""Forward graphs of an analyzed model: recorded per input shape, for training and for evaluation."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  the field's name

from meshwright.model.analysis.forward_graph_trace import (
    ForwardGraphCache,
    add_stage_boundaries,
    get_forward_graphs,
)
from meshwright.plan.job.errors import PlanError
from tests.model.block_backward import Chain, analyze_model
from tests.model.pipeline.staged_model import X, chained


def glue(model: Chain, x: torch.Tensor) -> object:
    y = model.layers[1](model.layers[0](x).double().to(x.dtype))
    if model.training:
        y = y * 2
    return model.head(F.dropout(model.layers[2](y), 0.5, model.training))


def test_a_forward_graph_is_recorded_once_per_shape_and_once_for_evaluations():
    courses = ForwardGraphCache(analyze_model(lambda: Chain(glue), X), torch.float64)
    first = courses.get({"x": torch.zeros(1, 6)})
    assert courses.get({"x": torch.ones(9, 6)}) is first
    still = courses.get(X, training=False)
    assert still is not first
    assert [value.name for value in first.boundaries.live_values("layers.2")] == ["layers.1+0"]
    assert [value.name for value in still.boundaries.live_values("layers.2")] == ["layers.1"]


def test_the_least_recently_used_forward_graph_is_evicted():
    courses = ForwardGraphCache(analyze_model(lambda: Chain(glue), X), torch.float64, max_graphs=2)
    kinds = [{"x": torch.zeros(2, *between, 6)} for between in ((), (3,), (4,))]
    first, second = courses.get(kinds[0]), courses.get(kinds[1])
    assert courses.get(kinds[0]) is first
    third = courses.get(kinds[2])
    assert courses.get(kinds[0]) is first, "it was asked for after the second"
    assert courses.get(kinds[2]) is third
    assert courses.get(kinds[1]) is not second
    assert courses.get(kinds[2]) is third
    assert courses.get(kinds[0]) is not first


def sample_by_sample(model: Chain, x: torch.Tensor) -> object:
    return model.head(torch.stack(model.layers[0](x).unbind()))


def one_layer_more(model: Chain, x: torch.Tensor) -> object:
    x = model.layers[0](x)
    return model.head(model.layers[1](x) if len(x) > 3 else x)


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (
            sample_by_sample,
            (
                r"after layers\.0, unbind at test_forward_graph_trace\.py:\d+ returns 3 values on "
                r"3 samples, and unbind at .* 5 values on 5"
            ),
        ),
        (one_layer_more, r"it reaches head on 3 samples, and layers\.1 on 5"),
    ],
)
def test_the_line_where_two_recorded_forwards_differ_is_named(
    forward: Callable[[Chain, torch.Tensor], object], message: str
):
    with pytest.raises(PlanError, match=f"takes another path on 5 samples than on 3: {message}"):
        add_stage_boundaries(analyze_model(lambda: Chain(forward), X))


def test_a_model_spec_gets_stage_boundaries_on_request():
    analyzed = analyze_model(lambda: Chain(glue), X)
    assert analyzed.model_spec.stage_boundaries is None
    boundaries = add_stage_boundaries(analyzed).model_spec.stage_boundaries
    assert boundaries is not None
    assert boundaries.block_calls == analyzed.model_spec.block_calls
    assert {value.dtype for value in boundaries.values} == {"float32"}
    assert {
        value.dtype
        for value in add_stage_boundaries(analyzed, torch.float64).model_spec.stage_boundaries.values
    } == {"float64"}


def test_stage_boundaries_and_forward_graphs_of_an_analyzed_model_are_cached():
    analyzed = analyze_model(lambda: Chain(glue), X)
    boundaries = add_stage_boundaries(analyzed, compute_dtype=torch.float32).model_spec.stage_boundaries
    assert add_stage_boundaries(analyzed).model_spec.stage_boundaries is boundaries, (
        "products in the dtype of parameters are no other way"
    )
    assert get_forward_graphs(analyzed, torch.float32, "cpu").get(analyzed.example).boundaries is boundaries
    assert (
        add_stage_boundaries(analyzed, compute_dtype=torch.bfloat16).model_spec.stage_boundaries
        is not boundaries
    )
    assert get_forward_graphs(analyzed, torch.float64, "cpu") is not get_forward_graphs(
        analyzed, torch.float32, "cpu"
    )


def test_a_value_whose_shape_is_quadratic_in_the_samples_closes_its_boundaries():
    def compares(model: Chain, x: torch.Tensor) -> object:
        y = model.layers[0](x)
        alike = (y @ y.t()).flatten() * 2
        return model.head(model.layers[2](model.layers[1](y))) * alike.sum()

    one = chained(compares)
    assert one.boundaries.open_boundaries() == ()
    assert (
        "has the shape [9] of 3 samples and [25] of 5: it compares samples with each other"
        in one.boundaries.closed_boundaries[0].reason
    )


def test_a_forward_that_writes_into_its_input_is_refused():
    def writes(model: Chain, x: torch.Tensor) -> object:
        x.add_(1)
        return model.layers[1](model.layers[0](x))

    with pytest.raises(
        PlanError,
        match="the forward writes into its input 'x', and every stage that a rank runs would do so again",
    ):
        add_stage_boundaries(analyze_model(lambda: Chain(writes), X))


def normed(model: Chain, x: torch.Tensor) -> object:
    for layer in model.layers:
        x = F.layer_norm(layer(x), x.shape[-1:])
    return model.head(x)


def reads_values(model: Chain, x: torch.Tensor) -> object:
    return normed(model, x if bool((x > -100).all()) else -x)


@pytest.mark.parametrize("forward", [normed, reads_values])
@pytest.mark.parametrize(("compute", "on_cpu"), [(torch.bfloat16, "bfloat16"), (torch.float32, "float32")])
def test_values_between_stages_have_the_dtype_of_the_device_that_trains(
    forward: Callable[[Chain, torch.Tensor], object], compute: torch.dtype, on_cpu: str
):
    for device, expected in (("cpu", on_cpu), ("cuda", "float32")):
        graphs = ForwardGraphCache(analyze_model(lambda: Chain(forward), X), torch.float32, device)
        (value,) = graphs.get(X, compute).boundaries.live_values("layers.2")
        assert value.dtype == expected
