"""Compiled blocks of the models of `hf_defaults` beside the same models on one device, uncompiled: `verify`
in float64 under plans of 1, 2 and 3 ranks, with dropout in all of them.

Blocks are compiled by `aot_eager`, which traces forward and backward as Inductor does, and runs torch's own
kernels: what is compared is what Dynamo, AOTAutograd and the masks as inputs make of a block. A few models
run by Inductor, too. Per plan the result has the graphs of all ranks, the causes of graph breaks, and why
blocks run without a graph.

Probabilities of dropout that a config sets to 0 are 0.1 here; whole layers are not left out at random.
Routers of mixtures are not collected, since blocks would run uncompiled. A model whose own loss is refused
has the squares of its outputs as loss. A plan may be refused if it is refused without compiled blocks, too.
A model that is refused when it is analyzed has its reason in the result.
"""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from operator import attrgetter
from typing import Any
from unittest.mock import patch

import torch
import transformers

import meshwright as mw
from benchmarks.harness.case_store import CaseStore
from benchmarks.harness.result import Result
from benchmarks.models.head_batches import TEXTS, Batch
from benchmarks.models.head_families import ALL_HEADS, Head
from meshwright.api import default_strategies
from meshwright.parallel.memory import compiled_blocks
from meshwright.parallel.memory.block_compiler import BlockCompiler
from meshwright.plan.compiled_graphs import CompiledGraphs

NAME, BAR, TOLERANCE = "compiled_parity", 50, 1e-10
CLAIM = (
    "with compiled blocks, losses, gradients and parameters equal those of one device, uncompiled, to 1e-10 "
    "in float64: at least 50 models of transformers with dropout, on one device, under DDP, ZeRO-3, tp and "
    "pp on 2 and on 3 ranks, and with blocks recomputed; or the plan is refused, as without compiled blocks"
)
PROBABILITY, MICRO_BATCH, NUM_STEPS = 0.1, 2, 2
AGAIN = mw.ActivationCheckpointing(blocks=("*",))
PLANS: dict[str, tuple[mw.Mesh, tuple[mw.Strategy, ...]]] = {
    "one device": (mw.Mesh(), ()),
    "recompute": (mw.Mesh(), (AGAIN,)),
    "ddp 2": (mw.Mesh(dp_replicate=2), ()),
    "ddp 3": (mw.Mesh(dp_replicate=3), ()),
    "zero 3, 2": (mw.Mesh(dp_shard=2), ()),
    "zero 3, 3, recompute": (mw.Mesh(dp_shard=3), (AGAIN,)),
    "tp 2": (mw.Mesh(tp=2), ()),
    "tp 3": (mw.Mesh(tp=3), ()),
    "pp 2": (mw.Mesh(pp=2), ()),
    "pp 3": (mw.Mesh(pp=3), ()),
}
INDUCTOR = ("LlamaForCausalLM", "GPT2LMHeadModel", "T5ForConditionalGeneration", "ViTForImageClassification")
INDUCTOR_PLANS = ("one device", "zero 3, 2", "tp 3", "pp 2")
OWN_LOSS_REFUSED = (
    *("BartForCausalLM", "SwitchTransformersForConditionalGeneration", "Wav2Vec2ForCTC"),
    *("SegformerForSemanticSegmentation", "BertForPreTraining", "CLIPModel"),
)
OUTPUTS = ("logits", "prediction_logits", "seq_relationship_logits", "text_embeds", "image_embeds")
TARGETS = ("labels", "next_sentence_label")


def _sum_of_squares(outputs: Mapping[str, torch.Tensor], batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return torch.stack([outputs[name].square().sum() for name in OUTPUTS if name in outputs]).sum()


SQUARES = mw.Loss(_sum_of_squares, lambda batch: torch.tensor(len(next(iter(batch.values())))), TARGETS)


def check_model(head: Head, plans: list[str]) -> dict[str, Any]:
    """Returns the outcomes of `plans`, by name."""
    model = replace(head, config=fields_with_dropout(head.architecture, head.config)).build()
    batch = head.collate(model)
    loss = SQUARES if head.name in OWN_LOSS_REFUSED else None
    row: dict[str, Any] = {"case": head.name}
    try:
        analyzed = mw.analyze(model, batch, loss=loss)
    except mw.PlanError as error:
        return {**row, "refused": str(error)}
    row["plans"] = check_plans(analyzed, batch, plans, "aot_eager")
    if head.name in INDUCTOR:
        chosen = [name for name in INDUCTOR_PLANS if name in plans]
        row["inductor"] = check_plans(analyzed, batch, chosen, "inductor")
    return row


def check_plans(
    analyzed: mw.AnalyzedModel, batch: Batch, plans: list[str], backend: str
) -> dict[str, dict[str, Any]]:
    """Returns the outcome of each of `plans`, by name, and prints it."""
    found = {}
    for name in plans:
        found[name] = check_plan(analyzed, batch, name, backend)
        print(f"{analyzed.model_spec.name:30} {backend:10} {name:20} {found[name]}", flush=True)
    return found


def fields_with_dropout(architecture: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `fields` of the config of a model with dropout where they, or its defaults, have none."""
    config_class = attrgetter(architecture)(transformers).config_class
    return dict(_with_dropout(config_class(**fields).to_dict(), fields))


def _with_dropout(config: Mapping[str, Any], fields: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in fields.items():
        yield name, dict(_with_dropout(config[name], value)) if isinstance(value, dict) else value
    for name, value in config.items():
        if "layerdrop" in name:
            yield name, 0.0
        elif "drop" in name and value == 0 and not isinstance(value, bool):
            yield name, PROBABILITY
    if "output_router_logits" in config:
        yield "output_router_logits", False
    if "apply_spec_augment" in config:  # numpy draws it
        yield "apply_spec_augment", False


def check_plan(analyzed: mw.AnalyzedModel, batch: Batch, name: str, backend: str) -> dict[str, Any]:
    """Returns the largest error of the plan `name`, or why there is none, with the graphs of its ranks."""
    mesh, more = PLANS[name]
    job = mw.Job(train=mw.TrainConfig(batch=len(TEXTS), steps=NUM_STEPS))
    named = {each.name for each in more}
    chosen = [each for each in default_strategies(mesh, analyzed.model_spec) if each.name not in named]

    def make(*compiled: mw.Strategy) -> mw.Plan:
        micro_batch = MICRO_BATCH if mesh.pp > 1 else 0
        return mw.make_plan(analyzed, job, mesh, (*chosen, *more, *compiled), micro_batch)

    try:
        make()
    except mw.PlanError as error:
        return {"refused": error.diagnostics[0].problem}
    compilers: list[CompiledGraphs] = []

    def note_graphs(*given: Any) -> BlockCompiler:
        compiler = BlockCompiler(*given)
        compilers.append(compiler.graphs)
        return compiler

    with patch.object(compiled_blocks, "BlockCompiler", note_graphs):
        try:
            verdict = mw.verify(analyzed, make(mw.CompiledBlocks(backend=backend)), [batch] * NUM_STEPS)
        except Exception as error:  # a cell, so that the others still run
            return {"failed": f"{type(error).__name__}: {error}"}
    if not verdict.passed:
        return {"failed": str(verdict)}
    return {"error": max(verdict.max_errors.values()), **_graphs(compilers)}


def _graphs(ranks: list[CompiledGraphs]) -> dict[str, Any]:
    found: dict[str, Any] = {"graphs": sum(len(each.graphs) for each in ranks)}
    causes = {cause.rpartition(" at ")[0] or cause for each in ranks for _, cause in each.breaks}
    if causes:
        found["breaks"] = sorted(causes)
    uncompiled = {block: cause for each in ranks for block, cause in each.uncompiled.items()}
    if uncompiled:
        found["uncompiled"] = uncompiled
    return found


def worst_error(row: Mapping[str, Any]) -> float:
    """Returns the largest error of a model that was analyzed; infinite if a cell is neither equal nor
    refused.
    """
    cells = [*row["plans"].values(), *row.get("inductor", {}).values()]
    return max(cell.get("error", float("inf")) for cell in cells if "refused" not in cell)


def main(only: str = "", plans: str = "") -> None:
    """Checks every model, and writes the result; or those whose name begins with `only`, under some plans
    (separated by semicolons), and prints them.
    """
    torch.set_num_threads(1)
    asked, store = plans.split(";") if plans else list(PLANS), CaseStore(NAME)
    is_whole = not only and not plans
    found = store.read() if is_whole else {}
    for head in (head for head in ALL_HEADS if head.name.startswith(only) and head.name not in found):
        found[head.name] = check_model(head, asked)
        torch.compiler.reset()
        if is_whole:
            store.add(found[head.name])
    if is_whole:
        rows = [found[head.name] for head in ALL_HEADS]
        errors = [worst_error(row) for row in rows if "refused" not in row]
        detail = {"models": rows}
        result = Result.of_count(NAME, CLAIM, errors, limit=TOLERANCE, bar=BAR, detail=detail)
        print(result.write(NAME))


if __name__ == "__main__":
    main(*sys.argv[1:])
