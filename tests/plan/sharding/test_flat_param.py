"""Flat parameters: every element on one rank, shards at the alignment, and the padding that this costs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.plan.model_spec.model_spec import ParamSpec
from meshwright.plan.sharding.flat_param import QUANT_BLOCK_NUMEL, FlatParamSpec

SHAPES = st.lists(st.lists(st.integers(1, 40), max_size=3).map(tuple), min_size=1, max_size=6)
GRAINS = ["element", "block", "matrix"]


def weights_of(shapes: list[tuple[int, ...]]) -> list[ParamSpec]:
    return [ParamSpec(f"w{i}", shape, ("v",)) for i, shape in enumerate(shapes)]


@given(
    shapes=SHAPES, ranks=st.integers(1, 9), grain=st.sampled_from(GRAINS), multiple=st.sampled_from([1, 32])
)
def test_every_element_lies_in_one_shard_and_shards_do_not_overlap(
    shapes: list[tuple[int, ...]], ranks: int, grain: str, multiple: int
):
    params = weights_of(shapes)
    flat_param = FlatParamSpec.build("v", params, ("dp_shard",), ranks, grain, align_numel=multiple)
    held: dict[str, list[tuple[int, int]]] = {}
    for index in range(ranks):
        ends = 0
        for piece in sorted(flat_param.param_shards(index), key=lambda piece: piece.shard_offset):
            assert ends <= piece.shard_offset
            ends = piece.shard_offset + piece.numel
            assert ends <= flat_param.shard_numel
            held.setdefault(piece.name, []).append((piece.begin, piece.end))
    for param in params:
        spans = sorted(held.get(param.name, []))
        assert [begin for begin, _ in spans] == [0, *(end for _, end in spans[:-1])]
        assert spans[-1][1] == param.numel


@given(shapes=SHAPES, ranks=st.integers(1, 9), grain=st.sampled_from(GRAINS))
def test_parameters_and_shards_begin_at_multiples(shapes: list[tuple[int, ...]], ranks: int, grain: str):
    params = weights_of(shapes)
    aligned = FlatParamSpec.build("v", params, ("dp_shard",), ranks, grain, align_numel=64)
    shards = [piece.shard_offset for index in range(ranks) for piece in aligned.param_shards(index)]
    begins = *shards, *(begin for _, _, begin in aligned.params)
    assert {begin % 64 for begin in (aligned.shard_numel, *begins)} == {0}
    packed = FlatParamSpec.build("v", params, ("dp_shard",), ranks, grain)
    assert aligned.numel < packed.numel + 64 * ranks * (1 + len(params))


@given(shapes=SHAPES, ranks=st.integers(1, 9))
def test_shards_are_cut_at_the_alignment(shapes: list[tuple[int, ...]], ranks: int):
    params = {param.name: param for param in weights_of(shapes)}
    for grain in GRAINS[1:]:
        flat_param = FlatParamSpec.build("v", list(params.values()), ("dp_shard",), ranks, grain)
        for piece in (piece for index in range(ranks) for piece in flat_param.param_shards(index)):
            whole = params[piece.name]
            step = {"block": QUANT_BLOCK_NUMEL, "matrix": whole.numel}[grain]
            assert piece.begin % step == 0
            assert piece.end % step == 0 or piece.end == whole.numel


@pytest.mark.parametrize(("numel", "ranks", "shard"), [(10, 3, 4), (9, 3, 3), (2, 5, 1), (0, 3, 0)])
def test_shards_by_element_pad_less_than_one_element_per_rank(numel: int, ranks: int, shard: int):
    assert FlatParamSpec.build("v", weights_of([(numel,)]), ("dp_shard",), ranks).shard_numel == shard


def test_full_matrices_go_to_the_least_loaded_rank():
    flat_param = FlatParamSpec.build("v", weights_of([(3,), (10,), (4,), (4,)]), ("dp_shard",), 2, "matrix")
    assert [[piece.name for piece in flat_param.param_shards(index)] for index in (0, 1)] == [
        ["w1"],
        ["w0", "w2", "w3"],
    ]
    assert flat_param.shard_numel == 11


@given(
    shapes=SHAPES, ranks=st.integers(1, 9), grain=st.sampled_from(GRAINS), multiple=st.sampled_from([1, 32])
)
def test_an_owner_has_every_element_and_the_others_none(
    shapes: list[tuple[int, ...]], ranks: int, grain: str, multiple: int
):
    params, owner = weights_of(shapes), ranks // 2
    flat_param = FlatParamSpec.build(
        "v", params, ("dp_shard",), ranks, grain, align_numel=multiple, owner_index=owner
    )
    found = [flat_param.param_shards(index) for index in range(ranks)]
    assert [len(each) for each in found] == [len(params) * (index == owner) for index in range(ranks)]
    assert [(each.name, each.begin, each.end) for each in found[owner]] == [
        (each.name, 0, each.numel) for each in params
    ]
    assert [flat_param.local_numel(index) for index in range(ranks)] == [
        flat_param.numel * (index == owner) for index in range(ranks)
    ]
    assert flat_param.numel < sum(each.numel for each in params) + max(multiple, QUANT_BLOCK_NUMEL) * (
        len(params) + 1
    )
