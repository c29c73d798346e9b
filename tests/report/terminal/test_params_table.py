"""The parameter table: role, layout, why a parameter is whole, and the bytes on a rank."""

from io import StringIO

from rich.console import Console

from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.report.terminal.params_table import (
    ParamRow,
    param_rows,
    params_view,
    sharded_params_text,
)
from tests.parallel.tensor.odd_llama import llama, planned

UP = "model.layers.*.mlp.up_proj.weight"


def sharded_plan(mesh: Mesh, **sizes: object) -> Plan:
    return planned(llama(**sizes), mesh)[1]


def by_name(plan: Plan, parameters: str = "float32") -> dict[str, ParamRow]:
    whole = plan.sharding
    return {row.pattern: row for row in param_rows(whole, parameters)}


def test_equal_layers_are_one_row_with_the_bytes_of_all():
    rows = by_name(sharded_plan(Mesh(tp=2)))
    query = rows["model.layers.*.self_attn.q_proj.weight"]
    assert (query.count, query.shape, query.role) == (2, (48, 48), "colwise")
    assert query.config == "tp: out side, 3 units of 16"
    assert (query.nbytes, query.rank0_nbytes) == (
        2 * 48 * 48 * 4,
        2 * 32 * 48 * 4,
    )  # two of three groups of heads
    assert query.not_sharded_reason == ""
    assert rows["model.layers.*.mlp.down_proj.weight"].config == "tp: in side, 53 features"
    assert rows["lm_head.weight"].config == "tp: out side, 67 tokens"


def test_what_is_whole_says_why_and_what_it_costs():
    rows = by_name(sharded_plan(Mesh(tp=2), attention_bias=True))
    norm, bias = rows["model.norm.weight"], rows["model.layers.*.self_attn.o_proj.bias"]
    assert (norm.config, norm.not_sharded_reason, norm.rank0_nbytes) == (
        "replicated",
        "no strategy shards norms",
        norm.nbytes,
    )
    assert bias.not_sharded_reason == "added once, after the sum"
    plain = by_name(sharded_plan(Mesh()))["model.layers.*.self_attn.q_proj.weight"]
    assert plain.not_sharded_reason == "no strategy shards pairs of linear layers"


def test_shards_are_named_with_their_axis():
    rows = by_name(sharded_plan(Mesh(dp_shard=2, tp=2)))
    assert rows["model.layers.*.mlp.up_proj.weight"].config == "tp: out side, 53 features; dp_shard: shards"
    assert rows["model.norm.weight"].config == "dp_shard: shards"


def test_the_table_ends_with_what_a_rank_holds():
    plan, console = sharded_plan(Mesh(tp=2)), Console(width=160, record=True, file=StringIO())
    whole = plan.sharding
    console.print(params_view(whole, "bfloat16", plan_given=True))
    console.print(params_view(whole, "float32", plan_given=False))
    text = console.export_text()
    assert "parameters over tp 2" in text
    assert "parameters, if they were sharded over tp 2" in text
    held = sum(row.rank0_nbytes for row in by_name(plan, "bfloat16").values())
    assert f"{held / 1024:.3g} KiB of" in text


def test_a_plan_says_how_much_of_the_weights_a_rank_has():
    plan = sharded_plan(Mesh(tp=2))
    (said,) = sharded_params_text(plan).values()
    held = sum(row.rank0_nbytes for row in by_name(plan).values())
    assert said.startswith(f"{held / 1024:.3g} KiB of ")
    assert said.endswith("of it not sharded: see `meshwright inspect`")
    assert sharded_params_text(sharded_plan(Mesh())) == {}


def test_of_a_pipeline_it_is_the_stage_of_the_first_rank():
    plan = sharded_plan(Mesh(pp=2, tp=2))
    (said,) = sharded_params_text(plan).values()
    rows = by_name(plan).values()
    held, whole = (
        sum(row.rank0_nbytes for row in rows),
        sum(row.rank0_nbytes for row in rows if row.not_sharded_reason),
    )
    assert said.startswith(f"{held / 1024:.3g} KiB of ")
    assert f"on rank 0, by its stage, {whole} B of it not sharded" in said
    less = by_name(sharded_plan(Mesh(pp=2)))["model.embed_tokens.weight"].possible_saving_nbytes
    assert less == 0  # no weight is cut along pp


def test_each_stage_has_its_own_layers_and_a_row_has_all_stages():
    for mesh, features in ((Mesh(pp=2), 53), (Mesh(pp=2, tp=2), 27)):
        rows = by_name(sharded_plan(mesh, num_hidden_layers=3))
        up, table, head = (rows[name] for name in (UP, "model.embed_tokens.weight", "lm_head.weight"))
        assert up.count == 3
        assert sum(up.stage_nbytes) == up.nbytes * features // 53
        assert all(up.stage_nbytes)
        assert (table.stage_nbytes[1], head.stage_nbytes[0]) == (0, 0)
        assert all(row.rank0_nbytes == row.stage_nbytes[0] for row in rows.values())


def test_a_weight_that_two_stages_use_is_held_by_both():
    tied = by_name(sharded_plan(Mesh(pp=2), tie_word_embeddings=True))["model.embed_tokens.weight"]
    assert tied.stage_nbytes == (tied.nbytes, tied.nbytes)


def test_a_column_shows_each_stage_and_of_many_the_fullest():
    console = Console(width=200, record=True, file=StringIO())
    plan = sharded_plan(Mesh(pp=2, tp=2))
    console.print(params_view(plan.sharding, "float32", plan_given=True))
    text, rows = console.export_text(), by_name(plan).values()
    assert "parameters over pp 2 x tp 2" in text
    assert "in use on rank 0  in use on rank 2" in text
    assert f"on rank 0, {sum(row.stage_nbytes[1] for row in rows) / 1024:.3g} KiB on rank 2; " in text
    many = sharded_plan(Mesh(pp=6), num_hidden_layers=7)
    sums = [sum(each) for each in zip(*(row.stage_nbytes for row in by_name(many).values()), strict=True)]
    console.print(params_view(many.sharding, "float32", plan_given=True))
    heads = next(line for line in console.export_text().splitlines() if "in use on rank 5" in line)
    assert heads.count("in use on rank") == len({0, sums.index(max(sums)), 5})
    assert f"in use on rank {sums.index(max(sums))}" in heads
