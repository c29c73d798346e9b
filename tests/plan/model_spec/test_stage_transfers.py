"""Values that are live at stage boundaries, and the stages between them."""

import pytest

from meshwright.plan.job.errors import PlanError
from meshwright.plan.model_spec.stage_transfers import ClosedBoundary, StageBoundaries, StageValue

BLOCK_CALLS = ("embed", "layer.0", "layer.1", "layer.2", "head")
X = StageValue("embed", "embed", ("layer.0", "layer.2"), ((0, 1), (8, 0)), "float32")
Y = StageValue("layer.0", "layer.0", ("layer.1",), ((0, 1), (8, 0)), "bfloat16")
Z = StageValue(
    "layer.1+0", "layer.1", ("layer.2", "head"), ((0, 2), (0, 1)), "int64", False, "argmax", "model.py:7"
)
BOUNDARIES = StageBoundaries(BLOCK_CALLS, (X, Y, Z), (ClosedBoundary("head", "it reads a number", "do not"),))


def test_a_value_is_live_from_where_it_is_made_to_where_it_is_used_last():
    live = {
        block_call: [value.name for value in BOUNDARIES.live_values(block_call)]
        for block_call in BLOCK_CALLS[1:]
    }
    assert live == {
        "layer.0": ["embed"],
        "layer.1": ["embed", "layer.0"],
        "layer.2": ["embed", "layer.1+0"],
        "head": ["layer.1+0"],
    }


def test_a_stage_receives_what_it_uses_and_sends_what_others_use():
    first, middle, last = BOUNDARIES.stages(["layer.1", "layer.2"])
    assert (first.block_calls, first.inputs, first.outputs, first.is_first, first.is_last) == (
        BLOCK_CALLS[:2],
        (),
        (X, Y),
        True,
        False,
    )
    assert (middle.inputs, middle.outputs, middle.passthrough) == ((Y,), (Z,), (X,))
    assert (last.inputs, last.outputs, last.passthrough, last.is_last) == ((X, Z), (), (), True)


def test_one_stage_is_the_whole_model():
    (whole,) = BOUNDARIES.stages([])
    assert (whole.block_calls, whole.inputs, whole.outputs) == (BLOCK_CALLS, (), ())


def test_sizes_follow_the_samples_of_a_micro_batch():
    assert (X.shape(5), X.numel(5), X.nbytes(5), Y.nbytes(5)) == ((5, 8), 40, 160, 80)
    assert (Z.shape(3), Z.nbytes(3)) == ((6, 3), 144)
    assert str(Z) == "layer.1+0 (argmax at model.py:7)"


def test_diagnostics_name_the_closed_boundary_and_open_ones():
    assert BOUNDARIES.open_boundaries() == ("layer.0", "layer.1", "layer.2")
    text = "no stage can begin with 'head', after 'layer.2': it reads a number"
    text += r"\n  repair: begin it with 'layer.2'; or do not"
    with pytest.raises(PlanError, match=text):
        BOUNDARIES.stages(["head"])
    with pytest.raises(
        PlanError, match=r"'layer\.9' is not a block call\n  repair: did you mean 'layer\.[0-2]'\?"
    ):
        BOUNDARIES.stages(["layer.9"])
    for boundaries in (["layer.2", "layer.1"], ["layer.1", "layer.1"], ["embed"]):
        with pytest.raises(
            PlanError, match="are not in the order of the forward, each once and after its first block call"
        ):
            BOUNDARIES.stages(boundaries)


def test_a_value_of_samples_grows_with_them_along_one_dim():
    def dim(*sizes: tuple[int, int]) -> int | None:
        return StageValue("x", "a", ("b",), sizes, "float32").sample_dim

    assert dim((0, 1), (4, 0)) == 0
    assert dim((4, 0), (0, 6)) == 1
    assert dim((4, 0)) is None
    assert dim((1, 1), (4, 0)) is None
    assert dim((0, 1), (0, 1)) is None
