"""Lines of the load of experts: sums over steps, by expert and by rank."""

import meshwright as mw
from meshwright.plan.sharding.expert_load import ExpertLoad
from meshwright.run.telemetry.expert_load_lines import ExpertLoadLines
from tests.parallel.expert.mixture_model import analyzed_mixtral

LAYER = "model.layers.1.mlp.experts"


def lines_of(mesh: mw.Mesh, steps: int) -> ExpertLoadLines:
    job = mw.Job(train=mw.TrainConfig(steps=steps, batch=12))
    return ExpertLoadLines(mw.make_plan(analyzed_mixtral(), job, mesh))


def test_a_line_sums_the_loads_since_the_last_one():
    lines, load = lines_of(mw.Mesh(ep=3), 250), ExpertLoad(LAYER, (4, 1, 0, 2, 7), 3)
    found = [lines.add(step, [load]) for step in range(1, 8)]
    assert [line is not None for line in found] == [False, False, True, False, False, True, False]
    sums = {"experts": (12, 3, 0, 6, 21), "ranks": (15, 6, 21), "dropped": 9}
    assert found[5] == {"kind": "expert_load", "step": 6, "first_step": 4, "layers": {LAYER: sums}}
    assert lines.add(250, [load])["first_step"] == 7, "the last step ends a line"


def test_the_worst_layer_is_told():
    lines = lines_of(mw.Mesh(ep=3), 1)
    even, uneven = ExpertLoad(LAYER, (2, 2, 2, 2, 2), 0), ExpertLoad(LAYER, (4, 0, 0, 0, 0), 6)
    assert lines.worst([uneven, even]) == (5.0, 3.0, 6 / 20)
    assert lines.worst([even]) == (1.0, 4 * 3 / 10, 0.0)
    assert lines_of(mw.Mesh(), 1).worst([uneven]) == (5.0, None, 0.6), "one rank has all experts"


def test_a_run_without_experts_has_no_lines():
    lines = lines_of(mw.Mesh(), 1)
    assert lines.add(1, []) is None
    assert lines.worst([]) == (None, None, None)
