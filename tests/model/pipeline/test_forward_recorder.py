"""Plain modules in stages: which values cross a boundary, and what closes one."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  the field's name

from meshwright.model.analysis.forward_graph_trace import ForwardGraphCache, trace_forward_graph
from meshwright.plan.job.errors import PlanError
from tests.model.block_backward import Block, Chain, analyze_model, gathering, writing_in_place
from tests.model.pipeline.staged_model import X, chained, exact, live, ranks, refused


def test_live_values_are_made_before_and_used_after_the_boundary():
    def glue(model: Chain, x: torch.Tensor) -> object:
        first = model.layers[0](x)
        mixed = first * model.shift + x
        second = model.layers[1](mixed)
        third = model.layers[2](second + mixed)
        return model.head(third * first + mixed), second

    boundaries = exact(glue)
    assert live(boundaries) == {
        "layers.1": ["layers.0", "layers.0+1"],
        "layers.2": ["layers.0", "layers.0+1", "layers.1", "layers.1+0"],
        "head": ["layers.1", "layers.2+1"],
    }


def test_values_that_glue_makes_of_inputs_only_are_made_in_every_stage():
    def glue(model: Chain, x: torch.Tensor) -> object:
        mask = (x > 0) * model.scale
        for layer in model.layers:
            x = layer(x) * mask + torch.zeros_like(x)
        return model.head(x)

    boundaries = exact(glue)
    assert [value.name for value in boundaries.values] == ["layers.0+1", "layers.1+1", "layers.2+1"]
    assert boundaries.root_params == (("scale", ("layers.0", "layers.1", "layers.2")),)


def test_views_of_boundary_values_are_made_where_they_are_needed():
    def glue(model: Chain, x: torch.Tensor) -> object:
        y = model.layers[0](x)
        turned, wide = y.t(), y[:1].expand(y.shape)
        z = model.layers[1](y)
        return model.head(model.layers[2](z) + turned.t() + wide)

    boundaries = exact(glue)
    assert live(boundaries)["layers.2"] == ["layers.0", "layers.0+1", "layers.1"]
    assert boundaries.values[1].shape(4) == (1, 6)


def test_containers_keywords_and_non_tensors_cross():
    def block(block: Block, x: torch.Tensor, y: torch.Tensor, *, name: str, forward: None) -> object:
        z = block.linear(y).tanh()
        return {"same": x, "new": [z, None, 3]}, (z * 2, x[:2]), x.argmax(), torch.max(z, 0, keepdim=True)

    def glue(model: Chain, x: torch.Tensor) -> object:
        y, total = x, 0.0
        for layer in model.layers:
            found, (double, part), index, most = layer(x * 1.5, y, name="a", forward=None)
            x, y = found["same"] + found["new"][0], double
            total = total + part.sum() * index + most.values * found["new"][2]
            column, *_ = y.t()
            total = total + column.sum()
        return x * total, y

    exact(glue, block)


def test_blocks_that_are_called_several_times():
    def glue(model: Chain, x: torch.Tensor) -> object:
        for _ in range(2):
            x = model.layers[0](model.layers[1](x) + x)
        return model.head(x)

    assert exact(glue).block_calls == ("layers.1", "layers.0", "layers.1#2", "layers.0#2", "head")


def test_glue_that_writes_in_place_into_what_a_block_gave():
    boundaries = exact(writing_in_place, lambda block, x: block.linear(x))
    assert live(boundaries)["layers.1"] == ["layers.0+3~"]


def test_a_slice_that_is_scaled_in_place_is_one_write():
    def glue(model: Chain, x: torch.Tensor) -> object:
        for layer in model.layers:
            x = layer(x) + x
            x[:, 0] *= 0.5
        return model.head(x)

    assert [len(names) for names in live(exact(glue)).values()] == [1, 1, 1]


def test_two_values_that_are_written_at_once_are_two():
    def glue(model: Chain, x: torch.Tensor) -> object:
        for layer in model.layers:
            y = layer(x)
            one, other = y * 2, y * 3
            torch._foreach_mul_([one, other], 0.5)
            x = one - other
        return model.head(x)

    exact(glue)


def test_a_sum_that_begins_with_zeros():
    def glue(model: Chain, x: torch.Tensor) -> object:
        total = torch.zeros_like(x)
        for layer in model.layers:
            x = layer(x)
            total += x
        return model.head(total)

    assert [len(names) for names in live(exact(glue)).values()] == [2, 2, 1]


def test_a_tensor_that_gathers_values():
    assert [len(names) for names in live(exact(gathering)).values()] == [2, 2, 1]


def test_values_without_a_gradient_are_sent_unchanged():
    def glue(model: Chain, x: torch.Tensor) -> object:
        first = model.layers[0](x)
        order = first.detach().argsort(-1)
        second = model.layers[1](first)
        return model.head(model.layers[2](second).gather(-1, order))

    needed = {value.op: value.needs_grad for value in exact(glue).values if value.op}
    assert needed == {"argsort": False, "gather": True}


def reading_a_number(model: Chain, x: torch.Tensor) -> object:
    x = model.layers[1](model.layers[0](x))
    if x.sum().item() > 1e6:
        x = x * 2
    return model.head(model.layers[2](x))


def test_a_value_that_is_read_closes_the_boundaries_after_it_and_no_others():
    one = refused(reading_a_number)
    assert one.boundaries.open_boundaries() == ("layers.1",)
    text = (
        r"no stage can begin with 'layers\.2', after 'layers\.1': the glue after "
        r"'layers\.1' "
        r"reads the value of layers\.1\+0 "
    )
    with pytest.raises(
        PlanError,
        match=rf"{text}\(item at test_forward_recorder\.py:\d+\).*\n  repair: begin it with 'layers\.1'",
    ):
        one.boundaries.stages(["layers.2"])


def test_shapes_that_depend_on_values_close_boundaries():
    def glue(model: Chain, x: torch.Tensor) -> object:
        x = model.layers[0](x)
        x = model.layers[1](x[x > -9].view(x.shape))
        return model.head(model.layers[2](x))

    assert refused(glue).boundaries.open_boundaries() == ()


def test_a_tensor_left_in_an_attribute_closes_the_boundaries_up_to_its_use():
    def block(block: Block, x: torch.Tensor) -> torch.Tensor:
        if block.first is None:
            block.left.append(x.detach() * 2)
            return block.linear(x).tanh()
        return block.linear(x) + (block.first.left.pop() if block.first.left else 0)

    class Leaving(Chain):
        def __init__(self) -> None:
            super().__init__(
                lambda model, x: model.head(model.layers[2](model.layers[1](model.layers[0](x)))), block
            )
            for layer in self.layers:
                layer.left, layer.first = [], None
            object.__setattr__(self.layers[2], "first", self.layers[0])

    one = ranks(Leaving, X)
    assert one.boundaries.open_boundaries() == ("head",)
    assert (
        "'layers.2' uses a tensor that 'layers.0' made and did not return"
        in one.boundaries.closed_boundaries[0].reason
    )


def test_lists_that_a_block_writes_into_close_the_boundaries_after_it():
    def block(block: Block, x: torch.Tensor, past: list[torch.Tensor]) -> torch.Tensor:
        past.append(x)
        return block.linear(x).tanh()

    def glue(model: Chain, x: torch.Tensor) -> object:
        past: list[torch.Tensor] = []
        x = model.layers[0](x, past)
        return model.head(x + past[0])

    assert (
        "'layers.0' writes into a list or dict among its inputs"
        in refused(glue, block).boundaries.closed_boundaries[0].reason
    )


def test_opaque_objects_close_the_boundaries_after_them():
    class Opaque:
        def __init__(self, x: torch.Tensor) -> None:
            self.x = x

    def glue(model: Chain, x: torch.Tensor) -> object:
        for layer in model.layers[:2]:
            x = layer(x).x
        return model.head(x)

    one = chained(glue, lambda block, x: Opaque(block.linear(x).tanh()))
    assert one.boundaries.open_boundaries() == ()
    reason = one.boundaries.closed_boundaries[0].reason
    assert "'layers.0' returns a Opaque, whose contents cannot be followed" in reason


def test_a_view_that_is_written_closes_the_boundaries_in_between():
    def glue(model: Chain, x: torch.Tensor) -> object:
        y = model.layers[0](x)
        view = y[:, :3]
        z = model.layers[1](y * 2)
        view.mul_(2)
        return model.head(model.layers[2](z) + y)

    one = refused(glue, lambda block, x: block.linear(x))
    assert one.boundaries.open_boundaries() == ("layers.2", "head")
    assert "and would be sent separately" in one.boundaries.closed_boundaries[0].reason


def test_glue_draws_after_draws_for_boundary_values_close_boundaries():
    def glue(model: Chain, x: torch.Tensor) -> object:
        x = F.dropout(model.layers[0](x) * torch.rand(len(x), 1), 0.5)
        x = F.dropout(model.layers[1](x), 0.5) * torch.rand(len(x), 1)
        return model.head(model.layers[2](x))

    analyzed = analyze_model(lambda: Chain(glue), X)
    boundaries = trace_forward_graph(analyzed, X).boundaries
    assert boundaries.open_boundaries() == ("layers.1",)
    assert (
        "draws numbers for all stages (at test_forward_recorder.py:" in boundaries.closed_boundaries[0].reason
    )
    assert ForwardGraphCache(analyzed).get(X).boundaries == boundaries


def test_glue_draws_for_all_stages_after_a_block_that_drew_close_boundaries():
    def glue(model: Chain, x: torch.Tensor) -> object:
        for layer in model.layers:
            keep = torch.rand([]) >= 0.2  # a layer drop
            x = torch.where(keep, layer(x), x)
        return model.head(x)

    def dropping(block: Block, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(block.linear(x).tanh(), 0.5)

    boundaries = trace_forward_graph(analyze_model(lambda: Chain(glue, dropping), X), X).boundaries
    assert boundaries.open_boundaries() == ()
    closed = boundaries.closed_boundaries[0]
    assert closed.reason.startswith(
        "the glue after 'layers.0' draws numbers for all stages (at test_forward_recorder.py:"
    )
    assert "after others that the block draws, which later stages do not" in closed.reason
    assert "set the layer drop to 0" in closed.fix
    assert (
        len(trace_forward_graph(analyze_model(lambda: Chain(glue), X), X).boundaries.open_boundaries()) == 3
    )  # blocks that draw nothing
