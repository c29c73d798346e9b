"""Messages whose size the data decides: the ledger equals rows x width of the rows that were counted."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch

import meshwright as mw
from meshwright.model.loss.loss_definition import IGNORE_INDEX
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.ddp import DDP
from meshwright.plan.job.job import Job
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.rank_view import RankView
from meshwright.plan.step.program import Action, Allocation, Program, RuntimeSize, Transfer
from meshwright.plan.step.program_json import program_from_dict, program_to_dict
from meshwright.plan.strategy_interface import Handler, Runtime, Strategy
from meshwright.planner.program_cost.action_cost import ActionCosts
from meshwright.planner.program_cost.rank_memory import peak_nbytes
from meshwright.report.terminal.memory_and_sent_bytes import states_table
from meshwright.verifier.messages import count_problems, planned_messages
from meshwright.verifier.static_checks import static_checks
from tests.planner.simple_machine import ground
from tests.tiny_model import TOKENS, analyzed_model, case_of, first_of, plan_of, verdict_of

ROW_NBYTES = 1 << 10
COUNT = "counted tokens"


@dataclass(frozen=True)
class SharedRows(Strategy):
    """Every rank gets a row for each token that counts: as many from each rank as the fullest one has.

    COUNT_ROWS (says how many rows each rank has), ALLOT_ROWS (reads that), SHARE_ROWS (gathers them),
    DROP_ROWS (frees them).
    """

    name: ClassVar[str] = "shared_rows"
    phase: ClassVar = "comm"
    axis: str = "dp_replicate"
    extra_rows: int = 0  # planted: rows that are sent and not counted
    records: bool = True  # planted: whether the count is recorded
    max_rows: int = 0

    def rewrite(self, program: Program, view: RankView, job: Job) -> Program:
        ranks = view.plan.mesh.group_size((self.axis,))
        max_rows = self.max_rows or job.train.batch * TOKENS
        size = RuntimeSize(COUNT, ROW_NBYTES, expected_rows=max_rows // 2, max_rows=max_rows)
        share = Transfer("all_gather", (self.axis,), size.expected, dtype="uint8", runtime_size=size)
        count = Transfer("all_reduce", (self.axis,), 8 * ranks, dtype="int64")
        added = (
            Action("COUNT_ROWS", stream="comm", transfer=count),
            Action("ALLOT_ROWS", waits=("COUNT_ROWS()",)),
            Action(
                "SHARE_ROWS",
                stream="comm",
                waits=("ALLOT_ROWS()",),
                transfer=share,
                allocations=(Allocation("rows", size.expected, size),),
            ),
            Action("DROP_ROWS", waits=("SHARE_ROWS()",), frees=("rows",)),
        )
        return program.edit(lambda actions: [*added, *actions])

    def bind(self, runtime: Runtime) -> Mapping[str, Handler]:
        state, group = runtime.state, runtime.state.world.group((self.axis,))
        counts = torch.zeros(group.size, dtype=torch.int64)

        def count(action: Action) -> None:
            own = sum(int((each["labels"] != IGNORE_INDEX).sum()) for each in state.step.microbatches)
            counts.zero_()
            counts[group.index] = own
            state.issue(action, group.all_reduce(counts, action=action.name))

        def allot(action: Action) -> None:
            if self.records:
                group.ledger.record_count(COUNT, int(counts.max()))

        def share(action: Action) -> None:
            mine = torch.zeros(int(counts.max()) + self.extra_rows, ROW_NBYTES, dtype=torch.uint8)
            everyone = mine.new_empty(group.size, *mine.shape)
            state.issue(action, group.all_gather(everyone, mine, action=action.name))

        handlers = {"COUNT_ROWS": count, "ALLOT_ROWS": allot, "SHARE_ROWS": share}
        return {**handlers, "DROP_ROWS": lambda action: None}


@pytest.fixture(scope="module")
def analyzed() -> mw.AnalyzedModel:
    return analyzed_model()


def shared(analyzed: mw.AnalyzedModel, **options: int) -> Plan:
    return plan_of(analyzed, 3, (BatchSplit(), DDP(), SharedRows(**options)), micro_batch=2)


def test_the_bytes_of_each_step_are_those_of_its_rows(analyzed: mw.AnalyzedModel):
    plan = shared(analyzed)
    assert static_checks(plan) == []
    verdict = verdict_of(case_of(analyzed, plan), steps=3)
    assert verdict.passed, verdict
    assert verdict.planned_nbytes["SHARE_ROWS()"] == ROW_NBYTES * 12 * TOKENS // 2


def test_a_trace_compares_with_the_rows_that_were_counted(analyzed: mw.AnalyzedModel):
    found = mw.trace(analyzed, shared(analyzed), [1])
    assert found.passed, found
    assert found.num_messages == len(planned_messages(shared(analyzed).for_rank(0)))


def test_rows_that_were_not_counted_are_found(analyzed: mw.AnalyzedModel):
    plan = shared(analyzed, extra_rows=1)
    (problem,) = [each.problem for each in mw.trace(analyzed, plan, [1]).diagnostics]
    assert problem.startswith("SHARE_ROWS() issued: all_gather of ")
    step, quantity, name, _ = first_of(verdict_of(case_of(analyzed, plan), steps=1))
    assert (step, quantity) == (0, "ledger")
    assert "SHARE_ROWS(): all_gather of" in name


def test_a_count_that_is_not_recorded_is_named(analyzed: mw.AnalyzedModel):
    plan = shared(analyzed, records=False)
    expected = f"SHARE_ROWS() depends on '{COUNT}', and no such count was recorded"
    assert mw.trace(analyzed, plan, [1]).diagnostics[0].problem.startswith(expected)
    assert first_of(verdict_of(case_of(analyzed, plan), steps=1))[2] == expected


def test_more_rows_than_there_is_memory_for_are_named(analyzed: mw.AnalyzedModel):
    plan = shared(analyzed, max_rows=2)
    assert list(count_problems(plan.for_rank(0), {COUNT: 3})) == [
        ("SHARE_ROWS()", f"3 rows of '{COUNT}' were counted, and SHARE_ROWS() has memory for 2")
    ]
    assert first_of(verdict_of(case_of(analyzed, plan), steps=1))[2].endswith("SHARE_ROWS() has memory for 2")


def test_memory_is_said_as_expected_and_at_most_and_seconds_as_expected(analyzed: mw.AnalyzedModel):
    plan, more = shared(analyzed), ROW_NBYTES * 12 * TOKENS
    assert peak_nbytes(plan, 0, at_most=True) - peak_nbytes(plan, 0) == more // 2
    rows = {row[0]: row for row in states_table(plan).rows}
    assert rows["peak, at most"][1] - rows["peak"][1] == more // 2
    (share,) = [action for action in plan.program.roles[0].actions if action.kind == "SHARE_ROWS"]
    assert ActionCosts(plan, 0, ground(links=1e3)).cost(share).comm_s == more / 2 / 1e3
    exact = plan_of(analyzed, 3, (BatchSplit(), DDP()), micro_batch=2)
    assert "peak, at most" not in {row[0] for row in states_table(exact).rows}


def test_a_size_of_the_data_survives_the_json_form(analyzed: mw.AnalyzedModel):
    program = shared(analyzed).program
    nameless = program.edit(lambda actions: [replace(action, tensors=()) for action in actions])
    assert program_from_dict(json.loads(json.dumps(program_to_dict(program)))) == nameless


@pytest.mark.parametrize(
    ("nbytes", "max_rows", "message"), [(8, 5, "the size is 8 bytes"), (16, 3, "more rows than there can be")]
)
def test_a_size_that_contradicts_itself_is_refused(nbytes: int, max_rows: int, message: str):
    size = RuntimeSize(COUNT, 4, 4, max_rows)
    with pytest.raises(ValueError, match=message):
        Allocation("rows", nbytes, size)
    with pytest.raises(ValueError, match=message):
        Transfer("all_gather", ("tp",), nbytes, runtime_size=size)
