"""How fast the steps are that `memory_budget` chooses, beside greedy and torch's budget.

greedy     blocks with most operations per byte are kept, as many as fit; CPU seconds of a step of the
           budget over those of greedy, at most as many measured peak bytes (bar: 1)
torch      torch.compile with `activation_memory_budget` (min-cut partitioner, kernels not fused, so that
           both sides run the same ones): CPU seconds of a step of ours over those of torch's, at most as many
           measured peak bytes (bar: 1). With its largest budget torch keeps less than everything, and takes
           longer than a plain step; so each side over its own step with the largest budget is shown beside

Peak bytes are those that torch's CPU allocator gave out within a step and has not got back, on all sides.
They are as many to a thousandth: a step of torch's that keeps everything has 24 bytes less than one of ours.

Budgets are given measured milliseconds of the forwards of blocks (`forward_ms`), as commands give those of
`bench device`. What they choose equals trying everything (`memory_budget`).

python -m benchmarks.memory.memory_budget_speed             about twenty minutes
python -m benchmarks.memory.memory_budget_speed --quick     few rounds; writes nothing
"""

import gc
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from statistics import median
from typing import Any

import torch
import transformers
from torch import nn
from torch.profiler import ProfilerActivity, profile

from benchmarks.harness.interleaved_timing import Cost, Interval, Window, interval, measure, overall, verdict
from benchmarks.harness.result import Result
from meshwright.api import analyze, make_plan, parallelize
from meshwright.comm.backends.threads import single_rank_world
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.model.loss.token_cross_entropy import token_cross_entropy
from meshwright.parallel.memory.activation_checkpointing import ActivationCheckpointing
from meshwright.parallel.memory.memory_budget import MemoryBudget
from meshwright.plan.job.data_config import DataConfig
from meshwright.plan.job.job import Job, OptimizerConfig, TrainConfig
from meshwright.plan.job.model_config import ModelConfig
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.strategy_interface import Strategy
from meshwright.report.timeline.planned_vs_measured_bytes import planned_memory

NAME = "memory_budget_speed"
CLAIM = "memory_budget is no slower than greedy and torch's memory budget in as many measured bytes"
WINDOW, QUICK = Window(15, 40, 300, warmup=1), Window(2, 3, 60, window_s=0.0, threshold=64.0, warmup=1)
TOKENS, VOCABULARY, MIB = 128, 1_000, 2**20
FIRST_STEPS, FORWARDS = 3, 9
BYTES_TOLERANCE = 1e-3
FRACTIONS = (0.3, 0.5, 0.7)  # of what is held when everything is kept
KEEPS_ALL = MemoryBudget(1e6)
COMPILER = "aot_eager_decomp_partition"
Batch = Mapping[str, torch.Tensor]


def _llama() -> nn.Module:
    sizes = {"hidden_size": 256, "num_hidden_layers": 8, "num_attention_heads": 4, "intermediate_size": 704}
    config = transformers.LlamaConfig(**sizes, vocab_size=VOCABULARY, use_cache=False)
    return transformers.LlamaForCausalLM(config)


def _resnet() -> nn.Module:
    sizes = {"hidden_sizes": [32, 64, 128, 256], "depths": [2, 2, 2, 2], "num_labels": 10}
    config = transformers.ResNetConfig.from_dict({**sizes, "layer_type": "basic", "embedding_size": 32})
    return transformers.ResNetForImageClassification(config)


def _tokens() -> dict[str, torch.Tensor]:
    tokens = torch.randint(VOCABULARY, (8, TOKENS + 1), generator=torch.Generator().manual_seed(0))
    return {"input_ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}


def _images() -> dict[str, torch.Tensor]:
    pixels = torch.randn(8, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    return {"pixel_values": pixels, "labels": torch.arange(8) % 10}


MODELS: Mapping[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, torch.Tensor]]]] = {
    "Llama": (_llama, _tokens),
    "ResNet-18": (_resnet, _images),
}


class Step:
    """One configuration: a step of a plan."""

    def __init__(self, name: str, analyzed: AnalyzedModel, plan: Plan, batch: Batch) -> None:
        self.name, self._batch = name, dict(batch)
        self._engine = parallelize(analyzed, plan, world=single_rank_world(torch.device("cpu")))

    def step(self) -> Cost:
        """Runs a step."""
        return _timed(lambda: self._engine.step(self._batch))


class TorchStep:
    """One configuration: a plain step of the model, compiled with torch's memory budget."""

    def __init__(self, name: str, model: nn.Module, batch: Batch, budget: float) -> None:
        self.name, self._model, self._batch = name, model, batch
        self._optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        self._budget = budget
        compiler = torch._dynamo.lookup_backend(COMPILER)
        with (
            torch._functorch.config.patch(activation_memory_budget=budget),
            torch._dynamo.config.patch(fail_on_recompile_limit_hit=True),  # else the step runs uncompiled
        ):
            # a backend of its own: models of one class with one backend share what was compiled first
            self._compiled = torch.compile(model, backend=lambda *graph: compiler(*graph))
            self._step()

    def step(self) -> Cost:
        """Runs a step."""
        with torch._functorch.config.patch(activation_memory_budget=self._budget):
            return _timed(self._step)

    def _step(self) -> None:
        self._compiled(**self._batch).loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()


def peak_nbytes(configuration: Step | TorchStep) -> int:
    """Returns the peak bytes of a step, after those that make what stays and check graphs."""
    for _ in range(FIRST_STEPS):
        configuration.step()
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        configuration.step()
    recorded = profiler.profiler.kineto_results if profiler.profiler else None
    if recorded is None:
        raise RuntimeError("the profiler recorded nothing")
    events = [each for each in recorded.events() if each.name() == "[memory]"]
    ordered = sorted(events, key=lambda each: each.start_ns())
    return max(accumulate(each.nbytes() for each in ordered))  # pyrefly: ignore[missing-attribute]


def block_ms(model: nn.Module, block_calls: Sequence[str], batch: Batch) -> tuple[float, ...]:
    """Returns the median milliseconds of the forward of each block call, each of another module."""
    begun, found = dict[str, float](), {name: list[float]() for name in block_calls}
    handles = []
    for name in block_calls:
        module = model.get_submodule(name)
        begin = partial(lambda name, *_: begun.update({name: time.process_time()}), name)
        end = partial(lambda name, *_: found[name].append(time.process_time() - begun[name]), name)
        handles += [module.register_forward_pre_hook(begin), module.register_forward_hook(end)]
    for _ in range(FORWARDS):
        model(**batch)
    for handle in handles:
        handle.remove()
    return tuple(1e3 * median(found[name]) for name in block_calls)


def is_as_small(nbytes: int, limit: int) -> bool:
    """Returns whether `nbytes` are at most `limit`, to a thousandth."""
    return nbytes <= limit * (1 + BYTES_TOLERANCE)


def _timed(run: Callable[[], object]) -> Cost:
    cpu, wall = time.process_time(), time.perf_counter()
    run()
    return Cost(time.process_time() - cpu, time.perf_counter() - wall)


@dataclass(frozen=True)
class Subject:
    """A model that was analyzed, its batch, its plans on one device, and milliseconds of its blocks."""

    analyzed: AnalyzedModel
    batch: dict[str, torch.Tensor]
    forward_ms: tuple[float, ...]

    @classmethod
    def of(cls, name: str) -> "Subject":
        """Returns the model `name`."""
        make, batch = MODELS[name][0], MODELS[name][1]()
        torch.manual_seed(0)
        model = make()
        analyzed = analyze(model, batch, loss=token_cross_entropy())
        return cls(analyzed, batch, block_ms(model, analyzed.model_spec.block_calls, batch))

    def plan(self, *strategies: Strategy) -> Plan:
        """Returns the plan with `strategies`, with SGD."""
        job = Job(
            ModelConfig("model"),
            DataConfig("example", sequence=TOKENS),
            TrainConfig(batch=len(self.batch["labels"])),
            OptimizerConfig("sgd", lr=0.01),
        )
        return make_plan(self.analyzed, job, Mesh(), strategies)

    def step(self, name: str, *strategies: Strategy) -> Step:
        """Returns a configuration."""
        return Step(name, self.analyzed, self.plan(*strategies), self.batch)

    def planned_nbytes(self, *strategies: Strategy) -> int:
        """Returns the peak of the activations of a plan."""
        return planned_memory(self.plan(*strategies).for_rank(0).actions, {})[1]["activations"]

    def greedy(self, keep_nbytes: float) -> ActivationCheckpointing:
        """Returns the checkpointing of all blocks but those with most operations per byte, as many as fit."""
        spec, samples = self.analyzed.model_spec, len(self.batch["labels"])
        calls = list(zip(spec.block_calls, spec.flops, spec.saved_numel, strict=True))[:-1]
        recomputed = [call for call, _, saved in calls if saved]
        for call, _, saved in sorted(calls, key=lambda each: -each[1] / max(1, each[2])):
            if call in recomputed and 4 * saved * samples <= keep_nbytes:
                keep_nbytes -= 4 * saved * samples
                recomputed.remove(call)
        return ActivationCheckpointing(blocks=tuple(recomputed) or ("*",))

    def largest_budget(self, nbytes: int, tries: int) -> MemoryBudget:
        """Returns the largest budget that was found to take at most `nbytes` at the measured peak."""
        best = MemoryBudget(forward_ms=self.forward_ms)
        low, high = self.planned_nbytes(best), self.planned_nbytes()
        if is_as_small(peak_nbytes(self.step("tried", KEEPS_ALL)), nbytes):
            return KEEPS_ALL
        for _ in range(tries):
            middle = (low + high) / 2
            budget = replace(best, budget_mb=1.05 * middle / MIB)
            if is_as_small(peak_nbytes(self.step("tried", budget)), nbytes):
                best, low = budget, middle
            else:
                high = middle
        return best


def against_greedy(name: str, window: Window, tries: int) -> list[dict[str, Any]]:
    """Returns a row for each share of the activations that greedy keeps."""
    subject, rows = Subject.of(name), []
    spec, samples = subject.analyzed.model_spec, len(subject.batch["labels"])
    for fraction in FRACTIONS:
        greedy = subject.greedy(fraction * 4 * samples * sum(spec.saved_numel))
        sides = [subject.step("greedy", greedy)]
        nbytes = peak_nbytes(sides[0])
        budget = subject.largest_budget(nbytes, tries)
        sides += [subject.step("budget", budget), subject.step("twin", greedy)]
        rounds = measure(sides, window)
        ratio, noise = (interval(rounds.ratios(side, "greedy")) for side in ("budget", "twin"))
        used = peak_nbytes(sides[1])
        rows.append(_row(name, fraction, (nbytes, used), ratio, noise, len(rounds.clean)))
    return rows


def against_torch(name: str, window: Window, tries: int) -> list[dict[str, Any]]:
    """Returns a row for each of torch's budgets, or its message if it does not compile."""
    subject, rows = Subject.of(name), []
    for fraction in FRACTIONS:
        torch.manual_seed(0)
        torch._dynamo.reset()  # all models count as one for the limit of recompilations
        model = MODELS[name][0]()
        try:
            theirs = TorchStep("torch", model, subject.batch, fraction)
            plain = TorchStep("torch keeps", MODELS[name][0](), subject.batch, 1.0)
        except Exception as error:  # told with its message, whatever it is
            return [{"model": name, "torch": f"{type(error).__name__}: {str(error)[:300]}", "holds": True}]
        nbytes = peak_nbytes(theirs)
        ours = subject.step("budget", subject.largest_budget(nbytes, tries))
        sides = [subject.step("keeps", KEEPS_ALL), ours, plain, theirs]
        sides.append(subject.step("twin", KEEPS_ALL))
        rounds = measure(sides, window)
        ratio, noise = (interval(rounds.ratios(*pair)) for pair in (("budget", "torch"), ("twin", "keeps")))
        own, theirs_own = rounds.ratios("budget", "keeps"), rounds.ratios("torch", "torch keeps")
        row = _row(name, fraction, (nbytes, peak_nbytes(ours)), ratio, noise, len(rounds.clean))
        shown = {
            "over own largest budget": {"ours": vars(interval(own)), "torch": vars(interval(theirs_own))},
            "largest budget, bytes": {"ours": peak_nbytes(sides[0]), "torch": peak_nbytes(plain)},
        }
        rows.append(row | shown)
    return rows


def _row(
    model: str, fraction: float, nbytes: tuple[int, int], ratio: Interval, noise: Interval, rounds: int
) -> dict[str, Any]:
    return {
        "model": model,
        "fraction": fraction,
        "nbytes": nbytes[0],
        "budget_nbytes": nbytes[1],
        "ratio": vars(ratio),
        "aa": vars(noise),
        "rounds": rounds,
        "holds": overall([verdict(ratio, noise, 1.0), is_as_small(nbytes[1], nbytes[0])]),
    }


def main() -> None:
    """Measure, and write the result."""
    torch.set_num_threads(1)
    quick = "--quick" in sys.argv[1:]
    window, tries = (QUICK, 2) if quick else (WINDOW, 8)
    detail: dict[str, list[dict[str, Any]]] = {"greedy": [], "torch": []}
    for name in MODELS:
        for peer, run in (("greedy", against_greedy), ("torch", against_torch)):
            detail[peer] += run(name, window, tries)
            print(peer, detail[peer][-len(FRACTIONS) :], file=sys.stderr)
    if quick:
        return
    rows = [row for found in detail.values() for row in found if "ratio" in row]
    worst = max(rows, key=lambda row: row["ratio"]["high"])
    ratio = worst["ratio"]
    print(
        Result.of(
            NAME,
            CLAIM,
            values=[row["ratio"]["median"] for row in rows],
            median=ratio["median"],
            spread=(ratio["low"], ratio["high"]),
            bar=1.0,
            holds=overall(row["holds"] for row in rows),
            repeats=min(row["rounds"] for row in rows),
            detail=detail,
        ).write(NAME)
    )


if __name__ == "__main__":
    main()
