"""Orders of a user's own: tables as torch writes them, functions, and everything that is wrong with one, with
its place.
"""

import os
from pathlib import Path
from textwrap import dedent

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.parallel.pipeline.schedules import interleaved, one_f_one_b
from meshwright.parallel.pipeline.schedules.custom import load_schedule, to_csv
from meshwright.parallel.pipeline.schedules.schedule import VirtualStage
from meshwright.plan.job.errors import PlanError
from tests.parallel.pipeline.schedules.schedule_laws import COUNTS


@pytest.fixture
def write(tmp_path: Path):
    def written(text: str, name: str = "schedule.csv") -> str:
        path = tmp_path / name
        path.write_text(dedent(text).lstrip("\n"), encoding="utf-8")
        return str(path)

    return written


def faults_of(source: str, ranks: int, micros: int) -> list[tuple[str, str]]:
    with pytest.raises(PlanError) as refused:
        load_schedule(source, ranks, micros)
    assert all(fault.fix for fault in refused.value.diagnostics)
    return [
        (fault.location.removeprefix(f"{source}, "), fault.problem) for fault in refused.value.diagnostics
    ]


def test_pauses_and_what_follows_from_the_order_are_passed_over(write):
    source = write("""
        0F0,0UNSHARD,0F1,,0B0,0SEND_F0, 0B1 ,0REDUCE_GRAD
        ,1F0,1B0,,1F1,1B1,,

        """)
    made = load_schedule(source, 2, 2)
    assert made.virtual_stages == (VirtualStage(0, 0), VirtualStage(1, 1))
    assert [[str(slot) for slot in slots] for slots in made.actions] == [
        ["F0 of virtual stage 0", "F1 of virtual stage 0", "B0 of virtual stage 0", "B1 of virtual stage 0"],
        ["F0 of virtual stage 1", "B0 of virtual stage 1", "F1 of virtual stage 1", "B1 of virtual stage 1"],
    ]


def test_halves_of_backwards_and_overlapped_pairs_are_read(write):
    source = write("""
        0F0,0F1,0I0,0W0,0B1
        1F0,1I0,(1F1;1W0)OVERLAP_F_B,1B1
        """)
    assert to_csv(load_schedule(source, 2, 2)) == "0F0,0F1,0I0,0W0,0B1\n1F0,1I0,1F1,1W0,1B1\n"


@settings(deadline=None)
@given(chunks=st.integers(1, 3), **COUNTS)
def test_a_table_that_was_written_is_read_as_it_was(tmp_path_factory, ranks: int, micros: int, chunks: int):
    made = interleaved.interleaved_schedule(ranks, micros, chunks)
    path = tmp_path_factory.mktemp("table") / "schedule.csv"
    path.write_text(to_csv(made), encoding="utf-8")
    assert load_schedule(str(path), ranks, micros) == made


def test_everything_that_cannot_be_read_is_said_at_once_with_row_and_column(write):
    source = write("""
        0F0,0F1,0F1,F2,0B0,0B1
        1F0,1X0,0B1,1B1
        """)
    with pytest.raises(PlanError, match=f"{source}, row 1, column 4: 'F2' is not a schedule action"):
        load_schedule(source, 2, 2)
    assert faults_of(source, 2, 2) == [
        ("row 1, column 4", "'F2' is not a schedule action"),
        ("row 2, column 2", "'1X0' is not a schedule action"),
        ("row 1, column 3", "F1 of virtual stage 0 is in column 2 already"),
        ("row 2, column 3", "stage 0 is on the rank of row 1 already (column 1)"),
    ]


def test_of_a_table_in_another_spelling_the_first_cells_are_said_and_how_many_more_there_are(write):
    rows = "\n".join(
        ",".join(f"{stage}{kind}{micro}" for kind in "fb" for micro in range(20)) for stage in range(2)
    )
    with pytest.raises(PlanError) as refused:
        load_schedule(write(rows), 2, 20)
    assert len(refused.value.diagnostics) == 13
    assert "'0f11' is not a schedule action" in str(refused.value)
    assert "row 2, column 40: 68 more cells are not schedule actions, up to the one here" in str(
        refused.value
    )


def test_what_is_missing_and_the_wrong_counts_are_said_together(write):
    source = write("""
        0F0,0F1,0B0,0B1
        1F0,1F1,1B0
        """)
    assert [what for _, what in faults_of(source, 3, 4)] == [
        "microbatch 1 has F in stage 1: needed is one F, and one B or one I and one W",
        f"{source} has 2 rows, and the pipeline 3 ranks",
        f"{source} is for 2 microbatches, and the plan has 4",
    ]


def test_a_gap_in_the_stages_is_refused(write):
    assert faults_of(write("0F0,0B0\n7F0,7B0\n"), 2, 1) == [
        ("strategies.pipeline.schedule", "the stages are 0, 7")
    ]


def test_a_deadlock_is_shown_with_its_arrow_and_its_cell(write):
    source = write("""
        0F0,,0F1,0B0,0B1
        ,1B0,1F0,1F1,1B1
        """)
    ((where, what),) = faults_of(source, 2, 2)
    assert where == "row 2, column 2"
    assert (
        "rank 1: action 0 of 4, B0 of virtual stage 1, waits for F0 of stage 1  <-- deadlock: "
        "this rank runs it later" in what
    )
    assert what.count("<--") == 1


def test_a_function_gives_cells_or_an_order_for_any_counts(write):
    source = write(
        """
        from meshwright.parallel.pipeline.schedules.schedule import Schedule

        def cells(ranks, micros):
            return [
                [f"{rank}{kind}{micro}" for kind in "FB" for micro in range(micros)]
                for rank in range(ranks)
            ]

        def made(ranks, micros):
            return Schedule.with_looped_placement([[("F", 0, 0), ("B", 0, 0)]] * ranks)

        def odd(ranks, micros):
            return "0F0"

        def broken(ranks, micros):
            return 1 // 0
        """,
        "mine.py",
    )
    found = load_schedule(f"{source}:cells", 3, 2)
    assert (found.num_ranks, found.num_microbatches) == (3, 2)
    assert load_schedule(f"{source}:made", 1, 1).num_ranks == 1
    assert [what for _, what in faults_of(f"{source}:made", 2, 1)] == [
        "rank 1 does F0 of virtual stage 0, which is on rank 0",
        "rank 1 does B0 of virtual stage 0, which is on rank 0",
        "microbatch 0 has FFBB in stage 0: needed is one F, and one B or one I and one W",
        "microbatch 0 has nothing in stage 1: needed is one F, and one B or one I and one W",
    ]
    assert [what for _, what in faults_of(f"{source}:odd", 1, 1)] == [
        "odd(1, 1) returned a value of type str"
    ]
    assert [what for _, what in faults_of(f"{source}:broken", 1, 1)] == [
        f"broken(1, 1) raised ZeroDivisionError: integer division or modulo by zero ({source}, line 16)"
    ]
    with pytest.raises(PlanError, match=r"has no function 'cell'\n  repair: did you mean 'cells'"):
        load_schedule(f"{source}:cell", 1, 1)


def test_a_file_that_is_not_there_or_cannot_run_is_refused(write, tmp_path):
    with pytest.raises(PlanError, match=r"absent\.csv cannot be read"):
        load_schedule(str(tmp_path / "absent.csv"), 1, 1)
    os.mkfifo(tmp_path / "pipe.csv")
    with pytest.raises(PlanError, match=r"pipe\.csv: this is a named pipe; needed is a regular file"):
        load_schedule(str(tmp_path / "pipe.csv"), 1, 1)
    with pytest.raises(PlanError, match=r"bad\.py raised SyntaxError"):
        load_schedule(f"{write('def f(:', 'bad.py')}:f", 1, 1)


def test_a_file_or_a_function_that_leaves_is_refused_in_words(write):
    source = write("import sys\n\ndef leaves(ranks, micros):\n    sys.exit(3)\n", "leaving.py")
    with pytest.raises(
        PlanError,
        match=r"leaves\(2, 3\) raised SystemExit: 3 \(.*leaving\.py, line 4\)\n  repair: repair the f",
    ):
        load_schedule(f"{source}:leaves", 2, 3)
    with pytest.raises(PlanError, match=r"running .*gone\.py raised SystemExit: 4"):
        load_schedule(f"{write('raise SystemExit(4)', 'gone.py')}:f", 2, 3)


def test_a_function_may_be_one_of_ours(write):
    source = write(
        "from meshwright.parallel.pipeline.schedules.one_f_one_b import one_f_one_b_schedule\n", "ours.py"
    )
    assert load_schedule(f"{source}:one_f_one_b_schedule", 4, 6) == one_f_one_b.one_f_one_b_schedule(4, 6)
