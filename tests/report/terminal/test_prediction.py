"""The predicted time, memory and bytes of a plan, as shown and as kept with a run."""

from io import StringIO

import pytest
from rich.console import Console

from meshwright.plan.sharding.mesh import Mesh
from meshwright.planner.program_cost.prediction import predict_step
from meshwright.planner.program_cost.rank_memory import peak_nbytes
from meshwright.report.terminal.memory_and_sent_bytes import first_ranks
from meshwright.report.terminal.prediction import format_seconds, prediction_dict, prediction_view
from tests.parallel.tensor.odd_llama import analyzed_llama, planned
from tests.planner.simple_machine import ground

ON = ground(flops=1e9, moved=1e9, links=1e6)


def shown(mesh: Mesh, micro: int = 0) -> list[str]:
    plan = planned(analyzed_llama(), mesh, micro=micro, samples=6)[1]
    console = Console(width=120, record=True, file=StringIO())
    console.print(prediction_view(plan, predict_step(plan, ON)))
    return console.export_text().splitlines()


@pytest.mark.parametrize(("value", "text"), [(2.5, "2.5 s"), (0.0123, "12.3 ms"), (4e-6, "4 us")])
def test_seconds_are_in_the_unit_that_fits(value: float, text: str):
    assert format_seconds(value) == text


def test_the_head_says_the_step_and_the_table_where_it_goes():
    lines = shown(Mesh(dp_replicate=2))
    assert lines[0].startswith("a step takes ")
    assert "on 2 x even" in lines[0]
    assert "tokens per second" in lines[0]
    rows = [line.split()[0] for line in lines[2:] if line]
    assert rows == ["compute_s", "exposed_comm_s", "optimizer_s"]  # what takes no time is left out


def test_every_role_has_a_column():
    lines = shown(Mesh(pp=2), 2)
    assert lines[1].split() == ["step", "time", "pp0", "pp1"]
    assert any(line.startswith("idle_s") for line in lines)


def test_bytes_are_kept_without_hardware_and_seconds_with_it():
    plan = planned(analyzed_llama(), Mesh(pp=2), micro=2, samples=6)[1]
    plain = prediction_dict(plan, None)
    assert set(plain) == {"peak_memory", "sent"}
    for role, rank in zip(("pp0", "pp1"), first_ranks(plan), strict=True):
        assert sum(plain["peak_memory"][role].values()) == peak_nbytes(plan, rank)
    said = prediction_dict(plan, predict_step(plan, ON))
    assert said["step_s"] == pytest.approx(sum(said["roles"]["pp1"].values()))
