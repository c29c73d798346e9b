"""CPU seconds and forwards of the analysis of a model, before and after forwards were recorded.

Before is the tree at the commit BEFORE, in a git worktree of its own; after is this tree. A process analyzes
each of 12 families once to warm up and then several times: `analyze`, the sequence analysis, and the
measurement of memory. Processes of the two trees alternate, each twice, so two of one tree tell the noise.
DeepSeek-V3's own config, with 61 layers, is analyzed once in each process, cold.
"""

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from torch import nn

import benchmarks.models.custom_models as custom_models
import meshwright
from benchmarks.harness.result import ROOT, Result
from benchmarks.models.model_families import FAMILIES, SEQUENCE, Family

NAME = "analysis_cost"
BEFORE = "55850cc3"
FAMILY_NAMES = (
    *(
        "llama",
        "qwen3",
        "gpt2",
        "gpt_neox",
        "falcon",
        "gemma2",
        "mixtral",
        "deepseek_v3",
        "bert",
        "modernbert",
    ),
    *("bart", "t5"),
)
LARGE = "DeepSeek-V3, 61 layers"
Build = Callable[[], nn.Module | meshwright.Model]
ROUNDS, REPEATS, BAR = 2, 3, 0.5
CLAIM = (
    "Analyzing a model (analyze, sequences, memory) takes at most half the CPU seconds that it took before "
    "forwards were recorded: median of 12 families"
)


def main() -> None:
    """Measures both trees in turn, and writes the result."""
    rounds: dict[str, list[dict[str, list[float]]]] = {"before": [], "after": []}
    with TemporaryDirectory() as folder:
        before = Path(folder) / "before"
        subprocess.run(["git", "worktree", "add", "--detach", before, BEFORE], cwd=ROOT, check=True)
        try:
            for _ in range(ROUNDS):
                rounds["before"].append(_measure_tree(before))
                rounds["after"].append(_measure_tree(ROOT))
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", before], cwd=ROOT, check=True)
    rows = {name: _row(name, rounds) for name in (*FAMILY_NAMES, LARGE)}
    ratios = [rows[name]["ratio"] for name in FAMILY_NAMES]
    middle = median(ratios)
    spread = (min(ratios), max(ratios))
    result = Result.of(
        NAME,
        CLAIM,
        values=ratios,
        median=middle,
        spread=spread,
        bar=BAR,
        holds=middle <= BAR,
        repeats=ROUNDS * REPEATS,
        detail={"before": BEFORE, "families": rows},
    )
    print(result.write(NAME))


def _row(name: str, rounds: dict[str, list[dict[str, list[float]]]]) -> dict[str, Any]:
    """Returns the CPU seconds and forwards of a family in both trees, their ratio, and its noise."""
    seconds = {tree: [each[name][0] for each in found] for tree, found in rounds.items()}
    forwards = {tree: int(found[0][name][1]) for tree, found in rounds.items()}
    noise = max(max(each) / min(each) for each in seconds.values())
    ratio = min(seconds["after"]) / min(seconds["before"])
    return {"cpu_s": seconds, "forwards": forwards, "ratio": round(ratio, 3), "twin_ratio": round(noise, 3)}


def _measure_tree(tree: Path) -> dict[str, list[float]]:
    paths = os.pathsep.join((str(tree / "src"), str(ROOT)))
    command = [sys.executable, "-m", "benchmarks.models.analysis_cost", "here"]
    environment = {**os.environ, "PYTHONPATH": paths}
    found = subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(found.stdout.splitlines()[-1])


def measure_here() -> dict[str, list[float]]:
    """Returns the CPU seconds (the fewest of REPEATS) and forwards of each family, in this process."""
    torch.set_num_threads(1)
    families = {family.name: family for family in FAMILIES}
    config = transformers.DeepseekV3Config()
    ids = torch.randint(3, 250, (2, 64))
    found = {LARGE: _analyze(lambda: transformers.DeepseekV3ForCausalLM(config), _labelled(ids))}
    for name in FAMILY_NAMES:
        runs = [_analyze(*_case(families[name])) for _ in range(REPEATS + 1)]
        found[name] = [min(seconds for seconds, _ in runs[1:]), runs[-1][1]]
    return found


def _case(family: Family) -> tuple[Build, dict[str, torch.Tensor]]:
    fields = {key: value for key, value in family.config.items() if key != "architectures"}
    if family.factory:
        factory = getattr(custom_models, family.factory)
        return factory, factory().example
    build = _builder(family.architecture, fields)
    if not family.trains_on_text:
        return build, custom_models.masked_text()
    return build, _labelled(torch.randint(3, 250, (6, SEQUENCE)))


def _builder(architecture: str, fields: dict[str, Any]) -> Build:
    kind = getattr(transformers, architecture)
    return lambda: kind(transformers.AutoConfig.for_model(**fields))


def _labelled(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"input_ids": ids, "labels": ids.clone()}


def _analyze(build: Build, example: dict[str, torch.Tensor]) -> list[float]:
    """Returns the CPU seconds of an analysis, and the forwards of the whole model that it ran."""
    counts, before = Counter[str](), time.process_time()

    def counted() -> nn.Module | meshwright.Model:
        made = build()
        module = made.module if isinstance(made, meshwright.Model) else made
        module.register_forward_pre_hook(lambda module, args: counts.update(["forwards"]))
        return made

    analyzed = meshwright.analyze(counted, example)
    _ = analyzed.sequence_info
    analyzed.measure_memory(torch.float32, torch.float32)
    return [time.process_time() - before, counts["forwards"]]


if __name__ == "__main__":
    if sys.argv[1:] == ["here"]:
        print(json.dumps(measure_here()))
    else:
        main()
