"""How well compressed gradients learn: the loss of each codec beside that of exact sums, at equal steps.

A Llama of 3.8 M parameters on the source text of Python's standard library, in float32, on two ranks as
threads; AdamW, a cosine of 180 steps of 512 tokens. Exact sums and every codec are trained with the same
three seeds (initial values, order of the data). The loss is that of 128 held-out samples after the last step,
as `verify --curve` compares it.

    gap       mean over the seeds of (loss with codes - exact loss), as a share of the exact loss
    spread    largest - smallest exact loss, likewise

int8 has to be within the spread, powersgd and topk within 1 %, sign within 2 %; int4 has no bar, and is told.
The figure is the worst share of a bar that a codec takes. A Llama of 25.6 M is trained with one seed, and its
gaps are told. Nothing is timed, so others may run beside it; the same machine and Python give the same bits.
Finished curves are kept by commit: the same command continues.

    python -m benchmarks.compression.compression_curves --only int8      one codec; nothing is written
    python -m benchmarks.compression.compression_curves --steps 40       shorter; nothing is written
"""

import sysconfig
from argparse import ArgumentParser
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any

from benchmarks.harness.case_store import CaseStore
from benchmarks.harness.result import ROOT, Result
from meshwright.commands.verify import train_on_rank
from meshwright.parallel import STRATEGIES
from meshwright.plan.job.checkpoint_logging_config import RunConfig
from meshwright.plan.job.data_config import DataConfig
from meshwright.plan.job.job import EvalConfig, Job, LRScheduleConfig, OptimizerConfig, TrainConfig
from meshwright.plan.job.model_config import ModelConfig
from meshwright.plan.sharding.mesh import Mesh
from meshwright.resolve_config import open_valid_request, plan_request
from meshwright.run.config.config_and_plan_files import PlanRequest
from meshwright.run.config.strategy_tables import strategies_from_tables
from meshwright.testing.ranks import run_on_threads
from meshwright.verifier.loss_curves import NUM_SEEDS, CurveVerdict, LossCurve

NAME = "compression_curves"
CLAIM = (
    "Llama of 3.8 M on real text, equal steps, 3 seeds: int8 gradients end within the spread of seeds, "
    "PowerSGD and top-k 1 % within 1 % of the exact loss, signs within 2 %"
)
STEPS, SEQUENCE, BATCH, RANKS = 180, 64, 8, 2
EXACT_STEPS = STEPS // 10  # while the second moments of Adam settle
SIZES = {"num_hidden_layers": 5}  # of 3.8 M, beside those of examples/llama-small.json
LARGE_SIZES = {
    "hidden_size": 512,
    "intermediate_size": 1376,
    "num_hidden_layers": 8,
    "num_key_value_heads": 8,
}
LARGE_STEPS = 90
EXACT = ({"name": "batch_split"}, {"name": "ddp"})
LIMIT_S = 600.0


@dataclass(frozen=True)
class Codec:
    """A codec with its options; `bar` is the largest gap, None: the spread of seeds. Without `has_bar` the
    gap is only told.
    """

    options: Mapping[str, object]
    bar: float | None = None
    has_bar: bool = True


CODECS: Mapping[str, Codec] = {  # by mode
    "int8": Codec({}),
    "int4": Codec({}, has_bar=False),
    "sign": Codec({"exact_steps": EXACT_STEPS}, 0.02),
    "topk": Codec({"density": 0.01, "exact_steps": EXACT_STEPS}, 0.01),
    "powersgd": Codec({"rank": 4, "exact_steps": EXACT_STEPS}, 0.01),
}


def source_text_job(
    seed: int, num_steps: int, sizes: Mapping[str, int], *, batch: int = BATCH, warmup: int
) -> Job:
    """Returns the job of a Llama of `sizes` on the source text of Python's standard library."""
    excluded = ("site-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__")
    source = sysconfig.get_path("stdlib")
    return Job(
        ModelConfig(str(ROOT / "examples" / "llama-small.json"), overrides=dict(sizes)),
        DataConfig(source, include=("*.py",), exclude=excluded, sequence=SEQUENCE),
        TrainConfig(steps=num_steps, batch=batch, seed=seed),
        OptimizerConfig(lr=3e-3),
        LRScheduleConfig("cosine", warmup=warmup, floor=0.1),
        evaluate=EvalConfig(hold_out=128),
    )


def make_request(folder: Path, seed: int, num_steps: int, sizes: Mapping[str, int] = SIZES) -> PlanRequest:
    """Returns the request of exact sums, for a Llama of `sizes`."""
    job = source_text_job(seed, num_steps, sizes, warmup=num_steps // 12)
    return PlanRequest(job, RunConfig(folder=str(folder)), {"dp_replicate": RANKS})


def train_all(
    codecs: Sequence[str], num_steps: int, seeds: int = NUM_SEEDS, sizes: Mapping[str, int] = SIZES
) -> Iterator[tuple[str, LossCurve]]:
    """Yields the curve of exact sums ("") and of each codec, for each of the first `seeds` seeds."""
    store = CaseStore(NAME)
    known = store.read()
    with TemporaryDirectory() as folder:
        for seed in range(seeds):
            request = make_request(Path(folder), seed, num_steps, sizes)
            opened = cache(partial(open_valid_request, request))
            for mode in ("", *codecs):
                case = f"{mode or 'exact'}, seed {seed}, {num_steps} steps, {dict(sizes)}"
                if case not in known:
                    codec = ({"name": "compress", "mode": mode, **CODECS[mode].options},) if mode else ()
                    strategies = strategies_from_tables([*EXACT, *codec], STRATEGIES)
                    planned = replace(request, strategies=strategies)
                    run = plan_request(planned, Mesh(dp_replicate=RANKS), opened())
                    train = partial(train_on_rank, run, num_steps)
                    losses, held_out = run_on_threads(train, run.plan.mesh, timeout_s=LIMIT_S)[0]
                    known[case] = {"case": case, "losses": losses, "held_out": held_out}
                    store.add(known[case])
                found: dict[str, Any] = known[case]
                yield mode, LossCurve(seed, not mode, tuple(found["losses"]), tuple(found["held_out"]))


def verdicts(curves: Sequence[tuple[str, LossCurve]], num_steps: int) -> dict[str, CurveVerdict]:
    """Returns the comparison of each codec with exact sums, by mode."""
    exact = {each.seed: each for mode, each in curves if not mode}
    found = dict[str, CurveVerdict]()
    for name in dict.fromkeys(mode for mode, _ in curves if mode):
        pairs = [each for mode, lossy in curves if mode == name for each in (exact[lossy.seed], lossy)]
        told = "", "", f"dp_replicate {RANKS}", "llama of 3.8 M", "threads"
        found[name] = CurveVerdict(*told, (f"compress ({name})",), num_steps, tuple(pairs))
    return found


def share_of_bar(mode: str, verdict: CurveVerdict) -> float:
    """Returns the gap of a codec, as a share of its bar; infinite where a loss is not finite."""
    if verdict.outcome in ("diverged", "untold"):
        return float("inf")
    bar = CODECS[mode].bar
    return max(0.0, verdict.gap) / (verdict.spread if bar is None else bar)


def result(found: Mapping[str, CurveVerdict], large: Mapping[str, CurveVerdict]) -> Result:
    """Returns the result; its figure is the worst share of a bar. The gaps of `large` are told beside."""
    shares = {mode: share_of_bar(mode, each) for mode, each in found.items() if CODECS[mode].has_bar}
    worst = max(shares.values())
    rows = {
        mode: {
            "options": dict(CODECS[mode].options),
            "bar": (each.spread if CODECS[mode].bar is None else CODECS[mode].bar)
            if CODECS[mode].has_bar
            else None,
            **{"gap": each.gap, "gaps": each.gaps, "spread": each.spread, "outcome": each.outcome},
            "curves": [asdict(curve) for curve in each.curves[1::2]],
        }
        for mode, each in found.items()
    }
    exact = [asdict(curve) for curve in next(iter(found.values())).curves[::2]]
    return Result.of(
        NAME,
        CLAIM,
        values=list(shares.values()),
        median=worst,
        spread=(min(shares.values()), worst),
        bar=1.0,
        holds=worst <= 1.0,
        repeats=NUM_SEEDS,
        detail={
            "codecs": rows,
            "exact": exact,
            f"25.6 M, one seed, {LARGE_STEPS} steps": {
                mode: {"gap": each.gap, "curves": [asdict(curve) for curve in each.curves]}
                for mode, each in large.items()
            },
            "steps": STEPS,
            "tokens_per_step": BATCH * SEQUENCE,
        },
    )


def main() -> None:
    """Trains all and writes the result; a part of it is only shown."""
    parser = ArgumentParser(description="losses with compressed gradients")
    parser.add_argument("--only", choices=tuple(CODECS), action="append", help="a codec; nothing is written")
    parser.add_argument("--steps", type=int, default=STEPS, help="fewer steps; nothing is written")
    options = parser.parse_args()
    codecs = options.only or [mode for mode in CODECS if mode in STRATEGIES["compress"]]
    curves = told(train_all(codecs, options.steps))
    found = verdicts(curves, options.steps)
    for mode, verdict in found.items():
        print(f"{mode}: {share_of_bar(mode, verdict):.2f} of its bar; {verdict.reason}")
    if options.steps == STEPS and list(found) == list(CODECS):
        large = told(train_all(codecs, LARGE_STEPS, seeds=1, sizes=LARGE_SIZES))
        print(result(found, verdicts(large, LARGE_STEPS)).write(NAME))


def told(curves: Iterator[tuple[str, LossCurve]]) -> list[tuple[str, LossCurve]]:
    """Returns the curves, each of them printed once it is there."""
    found, started = list[tuple[str, LossCurve]](), monotonic()
    for mode, curve in curves:
        found.append((mode, curve))
        print(f"{mode or 'exact'}, {curve}, {monotonic() - started:.0f} s", flush=True)
    return found


if __name__ == "__main__":
    main()
