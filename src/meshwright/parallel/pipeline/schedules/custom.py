"""Custom schedules: a CSV table with a row per rank, or a Python function that returns one.

Why it works: a schedule is nothing but lists, so a list that a user wrote is as good as one that this
package makes. It is checked for missing and duplicate actions, simulated, drawn, estimated, and only then
run. All errors are reported at once, each with its row and column; for a deadlock, an arrow shows the root.

    0F0,0F1,0F2,,0B0,,0B1,,0B2         row 1 is rank 0; a cell is stage, kind, microbatch; empty: a pause
    ,1F0,1F1,1B0,1F2,1B1,,1B2,         kinds: F forward, B backward, or its halves I (inputs) and W (weights)

    rank of virtual stage s = the row in which its cells stand;  stage of virtual stage s = s

torch.distributed.pipelining writes and reads these tables. Cells for derived actions (UNSHARD, RESHARD,
REDUCE_GRAD, SEND_F, RECV_F, SEND_B, RECV_B) may stand between the others and are skipped: the plan makes its
own. A pair that torch would overlap, (0F4;7B1)OVERLAP_F_B, is its two actions one after the other. A
function, file.py:function, is called with the numbers of ranks and of microbatches and returns a list of
cells per rank, or a `Schedule`, which can also put a stage on two ranks. The placement of stages must not
depend on the microbatches: it is asked first for as many as there are ranks.
Cost: that of the lists.
Limits: a table is for one number of ranks and of microbatches; a function may be for all. The plan names
the file, not its text.
Paper: Liang et al. 2024, "TorchTitan", arXiv 2410.06511 (schedules from tables).
"""

import csv
import io
import re
import runpy
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple, cast

from meshwright.parallel.pipeline.schedules.schedule import (
    PIPELINE_KEY,
    PassKind,
    Schedule,
    ScheduleAction,
    ScheduleDeadlock,
    StageCosts,
    VirtualStage,
    simulate,
)
from meshwright.plan.job.errors import (
    Diagnostic,
    PlanError,
    raise_diagnostics,
    refuse_special_files,
    suggest_name,
)

CELL_PATTERN = re.compile(r"(\d+)([FBIW])(\d+)")
DERIVED_CELL_PATTERN = re.compile(r"(\d+)(UNSHARD|RESHARD|REDUCE_GRAD|SEND_F|RECV_F|SEND_B|RECV_B)(\d*)")
OVERLAP_PATTERN = re.compile(r"\(([^()]*)\)OVERLAP_F_B")
SCHEDULE_KEY = f"{PIPELINE_KEY}.schedule"
MAX_REPORTED = 12  # cells that cannot be read and are told one by one
CELL_FORMAT = (
    "write stage, kind and microbatch, as in 1F0, where the kind is F, B, I or W; "
    "leave a cell empty for a pause"
)


class ScheduleCell(NamedTuple):
    """An action and its cell in the table; rows and columns begin at 1."""

    action: ScheduleAction
    row: int
    column: int

    @property
    def location(self) -> str:
        """The row and column, in words."""
        return f"row {self.row}, column {self.column}"


def load_schedule(source: str, num_ranks: int, num_microbatches: int) -> Schedule:
    """Returns the schedule of `source`, a path of a CSV or `file.py:function`, for the plan's numbers of
    ranks and microbatches.

    Raises:
        PlanError: with all errors of the schedule.
    """
    return _checked_schedule(
        _read_source(source, num_ranks, num_microbatches), source, num_ranks, num_microbatches
    )


def _read_source(source: str, ranks: int, num_microbatches: int) -> Schedule | Sequence[Sequence[str]]:
    path, _, function = source.rpartition(":")
    if path.endswith(".py"):
        return _call_function(Path(path), function, ranks, num_microbatches)
    fix = "give the path of a CSV file with a row per rank, or of a function: file.py:function"
    refuse_special_files([Path(source)], fix)
    try:
        text = Path(source).read_text(encoding="utf-8-sig")
        rows = list(csv.reader(io.StringIO(text, newline="")))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise PlanError(f"{source} cannot be read: {error}", fix=fix, location=SCHEDULE_KEY) from error
    while rows and not any(cell.strip() for cell in rows[-1]):
        rows.pop()
    return rows


def is_schedule_source(name: str) -> bool:
    """Returns whether `name` is a file with a schedule, not the name of one."""
    return name.endswith(".csv") or ".py:" in name


def load_virtual_stages(source: str, num_ranks: int) -> tuple[VirtualStage, ...]:
    """Returns the placement of stages in `source`; a function is called for as many microbatches as ranks.

    Raises:
        PlanError: it cannot be read, or is for another number of ranks.
    """
    schedule, diagnostics, _ = _parse(_read_source(source, num_ranks, num_ranks), source, num_ranks)
    raise_diagnostics(diagnostics)
    return schedule.virtual_stages


def file_digest(source: str) -> str:
    """Returns 16 hex digits of the contents of the file of `source`; "" if there is none."""
    path = _path(source)
    return sha256(path.read_bytes()).hexdigest()[:16] if path.is_file() else ""


def _path(source: str) -> Path:
    return Path(source.rpartition(":")[0] if ".py:" in source else source)


def to_csv(schedule: Schedule) -> str:
    """Returns `schedule` as a CSV with a row per rank, without pauses."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(
        [f"{s.virtual_stage}{s.kind}{s.microbatch}" for s in actions] for actions in schedule.actions
    )
    return text.getvalue()


def _call_function(
    path: Path, function: str, ranks: int, num_microbatches: int
) -> Schedule | Sequence[Sequence[str]]:
    try:
        schedule = runpy.run_path(str(path))
    except (Exception, SystemExit) as error:  # one that leaves would end the command without a word
        fix = "repair the file; it must run without side effects"
        raise PlanError(
            f"running {path} {_describe_error(error, path)}", fix=fix, location=SCHEDULE_KEY
        ) from error
    functions = [name for name, value in schedule.items() if callable(value) and not name.startswith("_")]
    if function not in functions:
        fix = (
            suggest_name(function, functions)
            if functions
            else "define a function of the numbers of ranks and of microbatches"
        )
        raise PlanError(f"{path} has no function '{function}'", fix=fix, location=SCHEDULE_KEY)
    try:
        rows = schedule[function](ranks, num_microbatches)
    except (Exception, SystemExit) as error:
        fix = "repair the function; it takes the numbers of ranks and of microbatches"
        raise PlanError(
            f"{function}({ranks}, {num_microbatches}) {_describe_error(error, path)}",
            fix=fix,
            location=SCHEDULE_KEY,
        ) from error
    if not isinstance(rows, Schedule) and not _is_table(rows):
        text = f"{function}({ranks}, {num_microbatches}) returned a value of type {type(rows).__name__}"
        fix = (
            "return a list per rank of cells such as '1F0', or a "
            "meshwright.parallel.pipeline.schedules.schedule.Schedule"
        )
        raise PlanError(text, fix=fix, location=SCHEDULE_KEY)
    return rows


def _describe_error(error: BaseException, path: Path) -> str:
    lines = [
        frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)
    ]
    return f"raised {type(error).__name__}: {error}" + (f" ({path}, line {lines[-1]})" if lines else "")


def _is_table(rows: object) -> bool:
    lists = isinstance(rows, Sequence) and all(
        isinstance(row, Sequence) and not isinstance(row, str) for row in rows
    )
    return lists and all(
        isinstance(cell, str) for row in cast("Sequence[Sequence[object]]", rows) for cell in row
    )


def _checked_schedule(
    given: Schedule | Sequence[Sequence[str]], source: str, ranks: int, num_microbatches: int
) -> Schedule:
    schedule, diagnostics, cells = _parse(given, source, ranks)
    if schedule.num_microbatches != num_microbatches:
        text = (
            f"{source} is for {schedule.num_microbatches} microbatches, and the plan has {num_microbatches}"
        )
        diagnostics.append(
            Diagnostic(
                text,
                f"write it for {num_microbatches}, or set the microbatches to {schedule.num_microbatches}",
                SCHEDULE_KEY,
            )
        )
    raise_diagnostics(diagnostics)
    try:
        simulate(schedule, StageCosts.uniform(schedule.num_stages))
    except ScheduleDeadlock as stuck:
        cell = cells[stuck.rank][stuck.action_index]
        fix = "move that cell behind the cells that it waits for, or those cells ahead of it"
        raise PlanError(str(stuck), fix=fix, location=f"{source}, {cell.location}") from stuck
    return schedule


def _parse(
    given: Schedule | Sequence[Sequence[str]], source: str, ranks: int
) -> tuple[Schedule, list[Diagnostic], list[list[ScheduleCell]]]:
    if isinstance(given, Schedule):
        schedule, cells = (
            given,
            [
                [ScheduleCell(action, *at) for action, at in _with_positions(actions, rank)]
                for rank, actions in enumerate(given.actions)
            ],
        )
    else:
        cells, diagnostics = _parse_cells(given)
        diagnostics += _check_rows(cells)
        raise_diagnostics(
            diagnostic
            if diagnostic.location == SCHEDULE_KEY
            else replace(diagnostic, location=f"{source}, {diagnostic.location}")
            for diagnostic in diagnostics
        )
        schedule = _schedule_from_cells(cells)
    diagnostics = [Diagnostic(text, "add, move or remove the cells", source) for text in schedule.errors()]
    if schedule.num_ranks != ranks:
        rows = f"{schedule.num_ranks} row{'s' * (schedule.num_ranks != 1)}"
        diagnostics.append(
            Diagnostic(
                f"{source} has {rows}, and the pipeline {ranks} ranks", "write a row per rank", SCHEDULE_KEY
            )
        )
    return schedule, diagnostics, cells


def _with_positions(
    actions: Sequence[ScheduleAction], rank: int
) -> Iterator[tuple[ScheduleAction, tuple[int, int]]]:
    yield from ((action, (rank + 1, at)) for at, action in enumerate(actions, start=1))


def _parse_cells(rows: Sequence[Sequence[str]]) -> tuple[list[list[ScheduleCell]], list[Diagnostic]]:
    cells: list[list[ScheduleCell]] = []
    diagnostics: list[Diagnostic] = []
    for number, row in enumerate(rows, start=1):
        cells.append([])
        for column, text in enumerate(row, start=1):
            pair = OVERLAP_PATTERN.fullmatch(text.strip())
            for stage in pair[1].split(";") if pair else [text]:
                found = CELL_PATTERN.fullmatch(stage.strip())
                if found:
                    action = ScheduleAction(cast("PassKind", found[2]), int(found[1]), int(found[3]))
                    cells[-1].append(ScheduleCell(action, number, column))
                elif stage.strip() and not DERIVED_CELL_PATTERN.fullmatch(stage.strip()):
                    diagnostics.append(
                        Diagnostic(
                            f"'{stage.strip()}' is not a schedule action",
                            CELL_FORMAT,
                            f"row {number}, column {column}",
                        )
                    )
    if len(diagnostics) > MAX_REPORTED:  # a table in another spelling
        more = len(diagnostics) - MAX_REPORTED
        diagnostics[MAX_REPORTED:] = [
            Diagnostic(
                f"{more} more cells are not schedule actions, up to the one here",
                CELL_FORMAT,
                diagnostics[-1].location,
            )
        ]
    return cells, diagnostics


def _check_rows(rows: Sequence[Sequence[ScheduleCell]]) -> list[Diagnostic]:
    diagnostics: list[Diagnostic] = []
    param_shardings: dict[int, ScheduleCell] = {}
    seen: dict[ScheduleAction, ScheduleCell] = {}
    for cell in (cell for row in rows for cell in row):
        param_sharding, first = (
            param_shardings.setdefault(cell.action.virtual_stage, cell),
            seen.setdefault(cell.action, cell),
        )
        if param_sharding.row != cell.row:
            text = (
                f"stage {cell.action.virtual_stage} is on the rank of row "
                f"{param_sharding.row} already (column "
                f"{param_sharding.column})"
            )
            diagnostics.append(Diagnostic(text, "keep each stage in one row", cell.location))
        elif first is not cell:
            diagnostics.append(
                Diagnostic(
                    f"{cell.action} is in column {first.column} already",
                    "remove one of them",
                    cell.location,
                )
            )
    if sorted(param_shardings) != list(range(len(param_shardings))):
        text = f"the stages are {', '.join(map(str, sorted(param_shardings)))}"
        diagnostics.append(
            Diagnostic(
                text, f"number them 0 .. {len(param_shardings) - 1}, in the order of the model", SCHEDULE_KEY
            )
        )
    return diagnostics


def _schedule_from_cells(rows: Sequence[Sequence[ScheduleCell]]) -> Schedule:
    param_shardings = {cell.action.virtual_stage: cell.row - 1 for row in rows for cell in row}
    stages = tuple(VirtualStage(param_shardings[stage], stage) for stage in sorted(param_shardings))
    return Schedule(stages, tuple(tuple(cell.action for cell in row) for row in rows))
