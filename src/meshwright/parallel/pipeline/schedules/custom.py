"""A schedule of your own: a table with a row per rank, or a Python function that returns one.

Why it works: a schedule is nothing but lists, so a list that somebody wrote is as good as one that this package makes. It goes
the same way: looked through for what is missing or stands twice, played on paper, drawn, priced, and only then run. Whatever is
wrong is said at once, each with its row and its column; where ranks would wait for each other for ever, an arrow shows the root.

    0F0,0F1,0F2,,0B0,,0B1,,0B2         row 1 is rank 0; a cell is stage, kind, micro-batch; an empty cell says nothing
    ,1F0,1F1,1B0,1F2,1B1,,1B2,         kinds: F forward, B backward, or its halves I (for what went in) and W (for the weights)

    rank of stage s = the row in which its cells stand;  part of stage s = s

These are the tables that torch.distributed.pipelining writes and reads. Cells for what follows from the order (UNSHARD, RESHARD,
REDUCE_GRAD, SEND_F, RECV_F, SEND_B, RECV_B) may stand between the others and are passed over: the plan makes its own. A pair that
torch would overlap, (0F4;7B1)OVERLAP_F_B, is its two acts one after the other. A function, file.py:function, is called with the
numbers of ranks and of micro-batches and returns a list of cells per rank, or an `Order`, which can also put a part on two ranks.
Where the parts lie must not depend on the micro-batches: it is asked first for as many as there are ranks.
Cost: that of the lists.
Limits: a table is for one number of ranks and of micro-batches; a function may be for all. The plan names the file, not its text.
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

from meshwright.parallel.pipeline.schedules.schedule import KEY, Costs, Kind, Order, Slot, Stage, Stuck, play
from meshwright.plan.job.errors import Fault, PlanError, nearest, raise_faults

CELL = re.compile(r"(\d+)([FBIW])(\d+)")
FOLLOWS = re.compile(r"(\d+)(UNSHARD|RESHARD|REDUCE_GRAD|SEND_F|RECV_F|SEND_B|RECV_B)(\d*)")
PAIR = re.compile(r"\(([^()]*)\)OVERLAP_F_B")
WHERE = f"{KEY}.schedule"
SHOWN = 12  # cells that cannot be read and are told one by one
FORM = "write stage, kind and micro-batch, as in 1F0, where the kind is F, B, I or W; leave a cell empty for a pause"


class Cell(NamedTuple):
    """A slot and where it was written; rows and columns begin at 1."""

    slot: Slot
    row: int
    column: int

    @property
    def place(self) -> str:
        """Where it stands, in words."""
        return f"row {self.row}, column {self.column}"


def order(source: str, ranks: int, micros: int) -> Order:
    """The order that `source` gives, a path of a CSV or `file.py:function`, for as many ranks and micro-batches as the plan has.

    Raises PlanError with everything that is wrong with it.
    """
    return _checked(_rows(source, ranks, micros), source, ranks, micros)


def _rows(source: str, ranks: int, micros: int) -> Order | Sequence[Sequence[str]]:
    """What `source` says, unread."""
    path, _, function = source.rpartition(":")
    if path.endswith(".py"):
        return _called(Path(path), function, ranks, micros)
    try:
        text = Path(source).read_text(encoding="utf-8-sig")
        rows = list(csv.reader(io.StringIO(text, newline="")))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        fix = "give the path of a CSV file with a row per rank, or of a function: file.py:function"
        raise PlanError(f"{source} cannot be read: {error}", fix=fix, where=WHERE) from error
    while rows and not any(cell.strip() for cell in rows[-1]):
        rows.pop()
    return rows


def is_source(name: str) -> bool:
    """Whether `name` is meant as a file with a schedule, not as the name of one."""
    return name.endswith(".csv") or ".py:" in name


def stages(source: str, ranks: int) -> tuple[Stage, ...]:
    """Where the parts lie that `source` orders; a function is asked for as many micro-batches as there are ranks.

    Raises PlanError where it cannot be read, or is for another number of ranks.
    """
    made, faults, _ = _made(_rows(source, ranks, ranks), source, ranks)
    raise_faults(faults)
    return made.stages


def digest(source: str) -> str:
    """16 hex digits that name what the file of `source` holds; nothing where there is none."""
    path = _path(source)
    return sha256(path.read_bytes()).hexdigest()[:16] if path.is_file() else ""


def _path(source: str) -> Path:
    return Path(source.rpartition(":")[0] if ".py:" in source else source)


def table(order: Order) -> str:
    """`order` as a CSV with a row per rank, without pauses."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([f"{s.stage}{s.kind}{s.micro}" for s in slots] for slots in order.slots)
    return text.getvalue()


def _called(path: Path, function: str, ranks: int, micros: int) -> Order | Sequence[Sequence[str]]:
    """What the function returns."""
    try:
        made = runpy.run_path(str(path))
    except (Exception, SystemExit) as error:  # one that leaves would end the command without a word
        fix = "repair the file; it must run without side effects"
        raise PlanError(f"running {path} {_raised(error, path)}", fix=fix, where=WHERE) from error
    functions = [name for name, value in made.items() if callable(value) and not name.startswith("_")]
    if function not in functions:
        fix = nearest(function, functions) if functions else "define a function of the numbers of ranks and of micro-batches"
        raise PlanError(f"{path} has no function '{function}'", fix=fix, where=WHERE)
    try:
        rows = made[function](ranks, micros)
    except (Exception, SystemExit) as error:
        fix = "repair the function; it takes the numbers of ranks and of micro-batches"
        raise PlanError(f"{function}({ranks}, {micros}) {_raised(error, path)}", fix=fix, where=WHERE) from error
    if not isinstance(rows, Order) and not _is_table(rows):
        text = f"{function}({ranks}, {micros}) returned a value of type {type(rows).__name__}"
        fix = "return a list per rank of cells such as '1F0', or a meshwright.parallel.pipeline.schedules.schedule.Order"
        raise PlanError(text, fix=fix, where=WHERE)
    return rows


def _raised(error: BaseException, path: Path) -> str:
    """What was raised, and the last line of the file at `path` that led to it."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return f"raised {type(error).__name__}: {error}" + (f" ({path}, line {lines[-1]})" if lines else "")


def _is_table(rows: object) -> bool:
    lists = isinstance(rows, Sequence) and all(isinstance(row, Sequence) and not isinstance(row, str) for row in rows)
    return lists and all(isinstance(cell, str) for row in cast("Sequence[Sequence[object]]", rows) for cell in row)


def _checked(given: Order | Sequence[Sequence[str]], source: str, ranks: int, micros: int) -> Order:
    """The order of `given`. Raises PlanError with everything that is wrong with it."""
    made, faults, cells = _made(given, source, ranks)
    if made.micros != micros:
        text = f"{source} is for {made.micros} micro-batches, and the plan has {micros}"
        faults.append(Fault(text, f"write it for {micros}, or set the micro-batches to {made.micros}", WHERE))
    raise_faults(faults)
    try:
        play(made, Costs.equal(made.parts))
    except Stuck as stuck:
        cell = cells[stuck.rank][stuck.at]
        fix = "move that cell behind what it waits for, or what it waits for ahead"
        raise PlanError(str(stuck), fix=fix, where=f"{source}, {cell.place}") from stuck
    return made


def _made(given: Order | Sequence[Sequence[str]], source: str, ranks: int) -> tuple[Order, list[Fault], list[list[Cell]]]:
    """The order of `given`, what is wrong with it as lists, and its cells. Raises PlanError where it cannot be read."""
    if isinstance(given, Order):
        made, cells = given, [[Cell(slot, *at) for slot, at in _numbered(slots, rank)] for rank, slots in enumerate(given.slots)]
    else:
        cells, faults = _read(given)
        faults += _rank_faults(cells)
        raise_faults(fault if fault.where == WHERE else replace(fault, where=f"{source}, {fault.where}") for fault in faults)
        made = _order(cells)
    faults = [Fault(text, "add, move or remove the cells", source) for text in made.faults()]
    if made.ranks != ranks:
        rows = f"{made.ranks} row{'s' * (made.ranks != 1)}"
        faults.append(Fault(f"{source} has {rows}, and the pipeline {ranks} ranks", "write a row per rank", WHERE))
    return made, faults, cells


def _numbered(slots: Sequence[Slot], rank: int) -> Iterator[tuple[Slot, tuple[int, int]]]:
    yield from ((slot, (rank + 1, at)) for at, slot in enumerate(slots, start=1))


def _read(rows: Sequence[Sequence[str]]) -> tuple[list[list[Cell]], list[Fault]]:
    """The cells that order something, row by row, and what cannot be read."""
    cells: list[list[Cell]] = []
    faults: list[Fault] = []
    for number, row in enumerate(rows, start=1):
        cells.append([])
        for column, text in enumerate(row, start=1):
            pair = PAIR.fullmatch(text.strip())
            for part in pair[1].split(";") if pair else [text]:
                found = CELL.fullmatch(part.strip())
                if found:
                    slot = Slot(cast("Kind", found[2]), int(found[1]), int(found[3]))
                    cells[-1].append(Cell(slot, number, column))
                elif part.strip() and not FOLLOWS.fullmatch(part.strip()):
                    faults.append(Fault(f"'{part.strip()}' is no act of a rank", FORM, f"row {number}, column {column}"))
    if len(faults) > SHOWN:  # a table in another spelling
        more = len(faults) - SHOWN
        faults[SHOWN:] = [Fault(f"{more} more cells are no act of a rank, up to the one here", FORM, faults[-1].where)]
    return cells, faults


def _rank_faults(rows: Sequence[Sequence[Cell]]) -> list[Fault]:
    """Stages in two rows, slots that stand twice, numbers of stages that are left out."""
    faults: list[Fault] = []
    homes: dict[int, Cell] = {}
    seen: dict[Slot, Cell] = {}
    for cell in (cell for row in rows for cell in row):
        home, first = homes.setdefault(cell.slot.stage, cell), seen.setdefault(cell.slot, cell)
        if home.row != cell.row:
            text = f"stage {cell.slot.stage} lies on the rank of row {home.row} already (column {home.column})"
            faults.append(Fault(text, "keep each stage in one row", cell.place))
        elif first is not cell:
            faults.append(Fault(f"{cell.slot} stands in column {first.column} already", "remove one of them", cell.place))
    if sorted(homes) != list(range(len(homes))):
        text = f"the stages are {', '.join(map(str, sorted(homes)))}"
        faults.append(Fault(text, f"number them 0 .. {len(homes) - 1}, in the order of the model", WHERE))
    return faults


def _order(rows: Sequence[Sequence[Cell]]) -> Order:
    homes = {cell.slot.stage: cell.row - 1 for row in rows for cell in row}
    stages = tuple(Stage(homes[stage], stage) for stage in sorted(homes))
    return Order(stages, tuple(tuple(cell.slot for cell in row) for row in rows))
