"""How well compressed gradients learn: the loss of each codec beside that of exact sums, at equal steps.

A Llama of 3.8 M parameters on the source text of Python's standard library, in float32, on two ranks as
threads; AdamW, a cosine of 180 steps of 512 tokens. Exact sums and every codec are trained with the same
three seeds (initial values, order of the data). The loss is that of 128 held-out samples after the last step,
as `verify --curve` compares it. AdamW divides an element by its own recent size, so the element of a code
that carries many gradients at once moves no further than any other; Adafactor divides it by the size of its
row and column. So signs and top-k are trained under both, each beside exact sums under the same optimizer.

    gap       mean over the seeds of (loss with codes - exact loss), as a share of the exact loss
    spread    largest - smallest exact loss, likewise

int8 has to be within the spread, powersgd and topk within 1 %, sign within 2 % under Adafactor; int4, signs
under AdamW and top-k under Adafactor have no bar, and are told. The figure is the worst share of a bar that a
codec takes. A Llama of 25.6 M is trained with one seed, and its gaps are told. Nothing is timed, so others
may run beside it; the same machine and Python give the same bits. Finished curves are kept by commit: the
same command continues.

    python -m benchmarks.compression.compression_curves --only int8      one codec; nothing is written
    python -m benchmarks.compression.compression_curves --steps 40       shorter; nothing is written
"""

import sysconfig
from argparse import ArgumentParser
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from itertools import product
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
from meshwright.resolve_config import OpenedRequest, open_valid_request, plan_request
from meshwright.run.config.config_and_plan_files import PlanRequest
from meshwright.run.config.strategy_tables import strategies_from_tables
from meshwright.testing.ranks import run_on_threads
from meshwright.verifier.loss_curves import NUM_SEEDS, CurveVerdict, LossCurve

NAME = "compression_curves"
CLAIM = (
    "Llama of 3.8 M on real text, equal steps, 3 seeds: int8 gradients end within the spread of seeds, "
    "PowerSGD and top-k 1 % within 1 % of the exact loss under AdamW, signs within 2 % under Adafactor"
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


ADAMW = OptimizerConfig(lr=3e-3)
ADAFACTOR = OptimizerConfig("adafactor", lr=3e-2)


@dataclass(frozen=True)
class Codec:
    """A codec with its options, under an optimizer; `bar` is the largest gap, None: the spread of seeds.
    Without `has_bar` the gap is only told.
    """

    mode: str
    options: Mapping[str, object] = field(default_factory=dict)
    bar: float | None = None
    has_bar: bool = True
    optimizer: OptimizerConfig = ADAMW

    @property
    def exact(self) -> str:
        """The name of the run of exact sums that it is compared with."""
        return f"exact, {self.optimizer.name}"


LATE: Mapping[str, object] = {"exact_steps": EXACT_STEPS}
LARGEST: Mapping[str, object] = {"density": 0.01, **LATE}
CODECS: Mapping[str, Codec] = {
    "int8": Codec("int8"),
    "int4": Codec("int4", has_bar=False),
    "powersgd": Codec("powersgd", {"rank": 4, **LATE}, 0.01),
    "topk": Codec("topk", LARGEST, 0.01),
    "sign": Codec("sign", LATE, has_bar=False),
    "topk, adafactor": Codec("topk", LARGEST, has_bar=False, optimizer=ADAFACTOR),
    "sign, adafactor": Codec("sign", LATE, 0.02, optimizer=ADAFACTOR),
}


def source_text_job(
    seed: int,
    num_steps: int,
    sizes: Mapping[str, int],
    *,
    batch: int = BATCH,
    warmup: int,
    optimizer: OptimizerConfig = ADAMW,
) -> Job:
    """Returns the job of a Llama of `sizes` on the source text of Python's standard library."""
    excluded = ("site-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__")
    source = sysconfig.get_path("stdlib")
    return Job(
        ModelConfig(str(ROOT / "examples" / "llama-small.json"), overrides=dict(sizes)),
        DataConfig(source, include=("*.py",), exclude=excluded, sequence=SEQUENCE),
        TrainConfig(steps=num_steps, batch=batch, seed=seed),
        optimizer,
        LRScheduleConfig("cosine", warmup=warmup, floor=0.1),
        evaluate=EvalConfig(hold_out=128),
    )


def make_request(
    folder: Path,
    seed: int,
    num_steps: int,
    sizes: Mapping[str, int] = SIZES,
    optimizer: OptimizerConfig = ADAMW,
) -> PlanRequest:
    """Returns the request of exact sums, for a Llama of `sizes`."""
    job = source_text_job(seed, num_steps, sizes, warmup=num_steps // 12, optimizer=optimizer)
    return PlanRequest(job, RunConfig(folder=str(folder)), {"dp_replicate": RANKS})


def train_all(
    names: Sequence[str], num_steps: int, seeds: int = NUM_SEEDS, sizes: Mapping[str, int] = SIZES
) -> Iterator[tuple[str, LossCurve]]:
    """Yields the curve of each codec of `names`, and of exact sums, for each of the first `seeds` seeds."""
    store = CaseStore(NAME)
    known: dict[str, Any] = store.read()
    with TemporaryDirectory() as folder:
        for seed, optimizer in product(range(seeds), (ADAMW, ADAFACTOR)):
            codecs = {name: CODECS[name] for name in names if CODECS[name].optimizer == optimizer}
            exact = {each.exact: Codec("", optimizer=optimizer) for each in codecs.values()}
            request = make_request(Path(folder), seed, num_steps, sizes, optimizer)
            opened = cache(partial(open_valid_request, request))
            for name, codec in {**exact, **codecs}.items():
                case = f"{name}, seed {seed}, {num_steps} steps, {dict(sizes)}"
                if case not in known:
                    known[case] = {"case": case, **train(codec, request, opened())}
                    store.add(known[case])
                losses, held_out = known[case]["losses"], known[case]["held_out"]
                yield name, LossCurve(seed, name in exact, tuple(losses), tuple(held_out))


def train(codec: Codec, request: PlanRequest, opened: OpenedRequest) -> dict[str, Any]:
    """Returns the losses of a run with a codec, and those of held-out samples."""
    table = ({"name": "compress", "mode": codec.mode, **codec.options},) if codec.mode else ()
    strategies = strategies_from_tables([*EXACT, *table], STRATEGIES)
    run = plan_request(replace(request, strategies=strategies), Mesh(dp_replicate=RANKS), opened)
    body = partial(train_on_rank, run, request.job.train.steps)
    losses, held_out = run_on_threads(body, run.plan.mesh, timeout_s=LIMIT_S)[0]
    return {"losses": losses, "held_out": held_out}


def verdicts(curves: Sequence[tuple[str, LossCurve]], num_steps: int) -> dict[str, CurveVerdict]:
    """Returns the comparison of each codec with exact sums, by name."""
    exact = {(name, each.seed): each for name, each in curves if each.is_exact}
    found = dict[str, CurveVerdict]()
    for name in dict.fromkeys(name for name, each in curves if not each.is_exact):
        codec = CODECS[name]
        lossy = [each for other, each in curves if other == name]
        pairs = [each for curve in lossy for each in (exact[codec.exact, curve.seed], curve)]
        told = "", "", f"dp_replicate {RANKS}", "llama of 3.8 M", "threads"
        found[name] = CurveVerdict(*told, (f"compress ({codec.mode})",), num_steps, tuple(pairs))
    return found


def share_of_bar(name: str, verdict: CurveVerdict) -> float:
    """Returns the gap of a codec, as a share of its bar; infinite where a loss is not finite."""
    if verdict.outcome in ("diverged", "untold"):
        return float("inf")
    bar = CODECS[name].bar
    return max(0.0, verdict.gap) / (verdict.spread if bar is None else bar)


def result(found: Mapping[str, CurveVerdict], large: Mapping[str, CurveVerdict]) -> Result:
    """Returns the result; its figure is the worst share of a bar. The gaps of `large` are told beside."""
    shares = {name: share_of_bar(name, each) for name, each in found.items() if CODECS[name].has_bar}
    worst, rows, exact = max(shares.values()), dict[str, dict[str, Any]](), dict[str, list[dict[str, Any]]]()
    for name, each in found.items():
        codec, bar = CODECS[name], CODECS[name].bar
        rows[name] = {
            "options": dict(codec.options),
            "optimizer": codec.optimizer.name,
            "bar": (each.spread if bar is None else bar) if codec.has_bar else None,
            **{"gap": each.gap, "gaps": each.gaps, "spread": each.spread, "outcome": each.outcome},
            "curves": [asdict(curve) for curve in each.curves[1::2]],
        }
        exact[codec.exact] = [asdict(curve) for curve in each.curves[::2]]
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
                name: {"gap": each.gap, "curves": [asdict(curve) for curve in each.curves]}
                for name, each in large.items()
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
    codecs = options.only or list(CODECS)
    curves = told(train_all(codecs, options.steps))
    found = verdicts(curves, options.steps)
    for name, verdict in found.items():
        print(f"{name}: {share_of_bar(name, verdict):.2f} of its bar; {verdict.reason}")
    if options.steps == STEPS and list(found) == list(CODECS):
        print(result(found, {}).write(NAME))  # the larger model takes as long again
        large = told(train_all(codecs, LARGE_STEPS, seeds=1, sizes=LARGE_SIZES))
        print(result(found, verdicts(large, LARGE_STEPS)).write(NAME))


def told(curves: Iterator[tuple[str, LossCurve]]) -> list[tuple[str, LossCurve]]:
    """Returns the curves, each of them printed once it is there."""
    found, started = list[tuple[str, LossCurve]](), monotonic()
    for name, curve in curves:
        found.append((name, curve))
        print(f"{name}, {curve}, {monotonic() - started:.0f} s", flush=True)
    return found


if __name__ == "__main__":
    main()
