"""Compiled blocks of six families beside the same model on one device, uncompiled: `verify` in float64 under
six plans, with the dropout of each family.

Blocks are compiled by `aot_eager`, which traces forward and backward as Inductor does, and runs torch's own
kernels: what is compared is what Dynamo, AOTAutograd and the masks as inputs make of a block. Per plan: the
number of graphs of all ranks, and where they end early.
"""

import sys
from typing import Any

import meshwright as mw
from benchmarks.harness.result import Result
from benchmarks.models.head_families import ALL_HEADS, Head
from meshwright.api import default_strategies
from meshwright.plan.job.errors import PlanError

NAME = "compiled_parity"
FAMILIES = (
    *("LlamaForCausalLM", "GPT2LMHeadModel", "T5ForConditionalGeneration", "ViTForImageClassification"),
    *("MixtralForCausalLM", "Qwen3ForCausalLM"),
)
CLAIM = (
    "With compiled blocks, losses, gradients and parameters equal those of one device, uncompiled, to 1e-10 "
    "in float64: six families, dropout as in their configs, on one device, under DDP, ZeRO-3, tp 2, pp 2 and "
    "with blocks recomputed"
)
AGAIN = mw.ActivationCheckpointing(blocks=("*",))
PLANS: dict[str, tuple[mw.Mesh, tuple[mw.Strategy, ...]]] = {
    "one device": (mw.Mesh(), ()),
    "ddp 2": (mw.Mesh(dp_replicate=2), ()),
    "zero 3": (mw.Mesh(dp_shard=2), ()),
    "tp 2": (mw.Mesh(tp=2), ()),
    "pp 2": (mw.Mesh(pp=2), ()),
    "recompute": (mw.Mesh(), (AGAIN,)),
}


def check_family(head: Head, plans: list[str]) -> dict[str, Any]:
    """Returns the outcome of each plan: the largest difference, or why there is none."""
    model = head.build()
    batch = head.collate(model)
    analyzed = mw.analyze(model, batch)
    return {name: check_plan(analyzed, batch, *PLANS[name]) for name in plans}


def check_plan(analyzed: mw.AnalyzedModel, batch: Any, mesh: mw.Mesh, more: tuple[mw.Strategy, ...]) -> str:
    """Returns "equal", the first difference, or the refusal."""
    num_samples = len(next(iter(batch.values())))
    job = mw.Job(train=mw.TrainConfig(batch=num_samples, steps=1))
    compiled = mw.CompiledBlocks(backend="aot_eager")
    chosen = [each for each in default_strategies(mesh, analyzed.model_spec) if each.name not in names(more)]
    try:
        plan = mw.make_plan(analyzed, job, mesh, (*chosen, *more, compiled), 2 if mesh.pp > 1 else 0)
        verdict = mw.verify(analyzed, plan, [batch, batch])
    except PlanError as error:
        return f"refused: {error.diagnostics[0].problem}"
    return "equal" if verdict.passed else str(verdict)


def names(strategies: tuple[mw.Strategy, ...]) -> set[str]:
    """Returns the names of `strategies`."""
    return {each.name for each in strategies}


def main(families: str = "", plans: str = "") -> None:
    """Runs all, or some (separated by commas), and prints them; writes the result of all."""
    chosen = families.split(",") if families else list(FAMILIES)
    asked = plans.split(",") if plans else list(PLANS)
    found = {}
    for head in ALL_HEADS:
        if head.name in chosen:
            found[head.name] = check_family(head, asked)
            for plan, outcome in found[head.name].items():
                print(f"{head.name:30} {plan:12} {outcome}", flush=True)
    outcomes = [outcome for row in found.values() for outcome in row.values()]
    wrong = float(sum(each != "equal" for each in outcomes))
    if not families and not plans:
        Result.of(
            NAME,
            CLAIM,
            values=[wrong],
            median=wrong,
            spread=(wrong, wrong),
            bar=0.0,
            holds=not wrong,
            repeats=1,
            detail=found,
        ).write(NAME)


if __name__ == "__main__":
    main(*sys.argv[1:])
