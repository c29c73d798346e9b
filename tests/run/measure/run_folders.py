"""The folder of a run that was never executed: files as `train` leaves them, written by hand."""

import json
from pathlib import Path

from meshwright.plan.job.file_format import METRICS, RUN_INFO, TRACE

STEP_S, COMPUTED_S, SENT_S, NBYTES = 0.5, 0.4, 0.05, 1 << 22
PLAN = """
format = "meshwright plan"
version = 1
micro_batch = {micro}
strategies = [
    {{ name = "batch_split", axis = "dp_replicate" }},
    {{ name = "{store}", axis = "dp_replicate" }}{more}
]
[model]
source = "there"
[data]
source = "text.txt"
sequence = 64
[train]
batch = 8
[mesh]
dp_replicate = 2
"""


def run_folder(
    folder: Path,
    steps: int = 20,
    device: str = "Abacus 7",
    *,
    traced: bool = True,
    store: str = "ddp",
    more: str = "",
) -> Path:
    """A run of two ranks: its first step took ten times as long,
    rank 1 computed less and waited for rank 0.
    """
    (folder / "trace").mkdir(parents=True)
    machine = (
        {"device": "cpu", "processor": device}
        if device.startswith("Abacus")
        else {"device": device, "processor": "x"}
    )
    (folder / "run_info.json").write_text(json.dumps(RUN_INFO.header | {"machine": machine}))
    (folder / "plan.toml").write_text(PLAN.format(micro=2, store=store, more=more))
    lines = [METRICS.header, {"step": 1, "seconds": 10 * STEP_S, "data_s": 0.0, "skipped": False}]
    lines += [
        {"step": 2 + n, "seconds": STEP_S + 0.01, "data_s": 0.01, "skipped": False} for n in range(steps)
    ]
    lines += [
        {"step": 3, "kind": "evaluation", "loss": 1.0},
        {"step": 99, "seconds": 9.0, "data_s": 0.0, "skipped": True},
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text + '{"step": 100, "sec')
    for rank in range(2 if traced else 0):
        parts = {
            "forward": COMPUTED_S / (4 + rank),
            "backward": COMPUTED_S / 2,
            "optimizer": COMPUTED_S / 8,
            "other": COMPUTED_S / 8,
        }
        waited = SENT_S * (1 + rank)
        events = [
            _event("all_reduce", NBYTES, waited),
            _event("all_reduce", 8, 0.3),
            _event("send", NBYTES, 9.0),
            {"name": "run"},
        ]
        said = {**TRACE.header, "otherData": {"seconds": {"2": parts}}, "traceEvents": events}
        (folder / "trace" / f"rank-{rank}.json").write_text(json.dumps(said))
    return folder


def _event(collective: str, nbytes: int, seconds: float) -> dict:
    args = {"step": 2, "collective": collective, "axes": "dp_replicate", "bytes": nbytes}
    return {"name": "x", "dur": 1e6 * seconds, "args": args}
