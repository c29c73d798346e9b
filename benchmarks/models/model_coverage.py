"""Parity of unmodified model families with one device, and what is found in them without a declaration.

Every family below is an unmodified class of transformers, or a plain `nn.Module` as a user would write it.
For each, `verify` compares data parallelism on 2 and on 3 ranks with one plain PyTorch loop on one device:
samples, loss, every gradient before clipping, gradient norm, and every parameter after the step, in float64
with SGD. The error is the largest difference of any of these, relative to the largest magnitude in its block.
Sizes are tiny, and everything else has the defaults of the family's config: dropout, tied weights, grouped
queries, sliding windows, soft caps, routing. Text is the standard library's.

Each model of transformers is also exported to a folder, loaded by its own `from_pretrained`, and loaded again
from there with `model.weights`: the logits, in float32, may differ by 1e-6 of the largest. A plain module is
written and read back.

The analysis finds: blocks (the members of the topmost `ModuleList`, `Sequential` or `ModuleDict`, and the
modules beside them), the order of the block calls, tied parameters, the parameters of each block call, draw
sites, buffers that are written. To see it for a model of your own:

    meshwright inspect CONFIG.toml

A causal language model trains on text from its config.json alone. One that predicts or takes something
else (masked tokens, images, a second sequence) comes from a factory with an example of one batch;
`benchmarks/models/custom_models.py` has one of each kind:

    def vit():
        return meshwright.Model(ViTForImageClassification(config), example={"pixel_values": images,
            "labels": classes})

If blocks are not found, or are not the ones you want, two lines declare them. Without blocks, the model runs
as one block, with the same numbers and nothing to overlap its backward with:

    def build():
        return meshwright.Model(Net(), blocks=["stem", "stages.0", "stages.1", "head"])

Router logits that transformers captures inside blocks (`output_router_logits = true`) are outputs of their
block, so a loss that sums over them (a z-loss) trains exactly, on any number of ranks. So does the auxiliary
loss of the model: its counts are summed over the global batch first. A loss of one's own that reads
`outputs.aux_loss` is exact where one forward has the whole batch (one data rank, one microbatch, any
pipeline, tensor and context parallelism), and refused by the plan elsewhere. Any other use of what is inside
a block in the loss, past its outputs, is refused by the name of the block.

Limits: batch norms take one microbatch; TorchScript modules are refused; a state that persists from
call to call (caches, recurrent states kept in the module) is not carried between steps.
"""

import json
import sys
from collections import Counter
from collections.abc import Iterable
from math import inf, isfinite
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import tomli_w
import torch

from benchmarks.harness.result import Result
from benchmarks.models.model_families import FAMILIES, SEQUENCE, Family
from meshwright.commands.inspect_model import explain_model
from meshwright.commands.verify import verify
from meshwright.model.analysis.model_report import ModelReport
from meshwright.model.hf.declared_tp_plan import is_transformers_model
from meshwright.model.loading.loader import load_model
from meshwright.plan.job.model_config import ModelConfig
from meshwright.run.export.hf_export import export_model, initial_model
from meshwright.run.export.roundtrip_check import compare_logits

RANKS, STEPS, BATCH, BAR, TOLERANCE = (2, 3), 2, 6, 15, 1e-10
CLAIM = (
    "at least 15 unmodified model families equal one device to 1e-10 in float64, under data "
    "parallelism on 2 and on 3 ranks; "
    "exported and loaded by transformers, their logits are equal to 1e-6 in float32"
)


# a masked language model, or an encoder and decoder: its inputs are masked, its labels are what was there
MASKED_FACTORY = """import json
from pathlib import Path

import transformers

import meshwright as mw
from benchmarks.models.custom_models import masked_text


def build():
    fields = json.loads((Path(__file__).parent / "config.json").read_text())
    config = transformers.AutoConfig.for_model(**fields)
    return mw.Model(transformers.{architecture}(config), example=masked_text())
"""


def check_family(family: Family, folder: Path) -> dict[str, Any]:
    """Returns what was found in `family`, what had to be declared, and its largest error on each number of
    ranks. Writes files to `folder`.
    """
    source = _source(family, folder)
    config = _config(family, source, folder)
    found = explain_model(config, []).report
    errors = {}
    for ranks in RANKS:
        verdict, _ = verify(
            config, [f"--mesh.dp_replicate={ranks}"], STEPS, None, None, launcher=None, shrink=False
        )
        errors[str(ranks)] = max(verdict.max_errors.values()) if verdict.passed else float("inf")
    compared, difference = _round_trips(source, folder / f"{family.name}-exported")
    return {
        "family": family.name,
        "class": family.architecture,
        "source": "config.json" if family.trains_on_text else "factory",
        "blocks": _blocks(found),
        "layer_roles": _layer_roles(found),
        "declared": "nothing" if family.trains_on_text else "example batch",
        "notes": [*found.notes, *(fault.problem for fault in found.diagnostics)],
        "errors": errors,
        "round_trip": {"compared": compared, "difference": difference},
    }


def main() -> None:
    """Verify every family, and write the result."""
    torch.set_num_threads(1)
    rows = []
    with TemporaryDirectory() as folder:
        for family in FAMILIES:
            rows.append(check_family(family, Path(folder)))
            print(family.name, rows[-1]["errors"], file=sys.stderr)
    worst = [
        max(*row["errors"].values(), 0.0 if isfinite(row["round_trip"]["difference"]) else float("inf"))
        for row in rows
    ]
    print(
        Result.of_count(
            "model_coverage", CLAIM, worst, limit=TOLERANCE, bar=BAR, detail={"families": rows}
        ).write("model_coverage")
    )


def _config(family: Family, source: str, folder: Path) -> Path:
    """Writes the config file of one family, as a user would; returns its path."""
    text = {"source": str(Path(json.__file__).parent), "sequence": SEQUENCE}
    data = text if family.trains_on_text else {"source": "example"}
    tables = {
        "model": {"source": source},
        "data": data,
        "train": {"batch": BATCH},
        "run": {"folder": str(folder / "run")},
    }
    path = folder / "config.toml"
    path.write_text(tomli_w.dumps({**tables, "mesh": {"dp_replicate": RANKS[0]}}))
    return path


def _source(family: Family, folder: Path) -> str:
    """Returns `model.source`: the family's factory, or its config.json, written to `folder`."""
    if family.factory:
        return f"{Path(__file__).parent / 'custom_models.py'}:{family.factory}"
    path = folder / "config.json"
    path.write_text(json.dumps(family.config))
    if family.trains_on_text:
        return str(path)
    (folder / "model.py").write_text(MASKED_FACTORY.format(architecture=family.architecture))
    return f"{folder / 'model.py'}:build"


def _round_trips(source: str, folder: Path) -> tuple[str, float]:
    """Returns what was compared, and the largest difference: the model exported and loaded by transformers,
    and that folder loaded here.

    A module that is not of transformers is written and read back. The difference is infinite where it exceeds
    its bound.
    """
    init = load_model(ModelConfig(source), seed=0).deferred_init
    trips = [export_model(initial_model(init), folder).round_trip]
    if is_transformers_model(init.instantiate()):
        reloaded = load_model(ModelConfig(source, weights=str(folder)), seed=1).deferred_init
        trips.append(compare_logits(reloaded, initial_model(reloaded).read_value, folder))
    return trips[0].description, max(trip.max_difference if trip.passed else inf for trip in trips)


def _blocks(found: ModelReport) -> str:
    """Returns the blocks as text: the number of block calls, and the runs of equal layers."""
    layers = [
        f"{row.first_block_call} .. {row.last_block_call.rpartition('.')[2]}"
        for row in found.blocks
        if row.num_block_calls > 1
    ]
    return f"{sum(row.num_block_calls for row in found.blocks)}" + (
        f" ({', '.join(layers)})" if layers else ""
    )


def _layer_roles(found: ModelReport) -> str:
    """Returns the linears, embeddings, heads and experts by role, as text."""
    counts: Counter[str] = Counter()
    for row in found.layers:
        if row.kind not in ("norm", "router"):
            counts[row.kind if row.kind == "experts" else row.role or "not known"] += row.num_layers
    return ", ".join(f"{number} {role}" for role, number in sorted(counts.items()))


def named(names: Iterable[str]) -> list[Family]:
    """Returns the families of these names, in order."""
    known = {family.name: family for family in FAMILIES}
    return [known[name] for name in names]


if __name__ == "__main__":
    main()
