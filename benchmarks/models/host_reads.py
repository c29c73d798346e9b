"""Reads of the device by the host in one training step, counted on fake CUDA tensors.

A read (`.item()`, `.tolist()`, a copy to the CPU), and a copy to the device from memory that is not pinned,
waits for all that the device still has to do, and nothing is launched meanwhile. One rank is simulated; its
second step runs forward, backward and optimizer on fake CUDA tensors in a CPU build of torch. A device guard
that does nothing (benchmarks/harness/noop_cuda.cpp) lets autograd run on them, on a thread of its own, as on
a GPU.

    reads    none: the loss is divided by the count on the device, and metrics are read when somebody looks
    waits    STEP waits for the copy of the count (`HostCopy.values`), that is, until the device has begun the
             step: forward and backward stay queued

Batches are on the CPU, as a data loader makes them: what counts in them is no read of the device. Before, a
step read the count of each microbatch and of all, the norm before the optimizer, norm and loss at the end,
and copied each tensor of each microbatch by itself: 4 reads, one per microbatch, and two copies.
"""

import json
import os
import sys
import traceback
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.data_parallel.small_llamas import (
    TOKENS,
    VOCABULARY,
    Case,
    analyzed_model,
    random_samples,
)
from benchmarks.harness.cuda_guard import end_process, run_with_fake_cuda
from benchmarks.harness.result import Result
from meshwright.api import analyze, make_plan
from meshwright.comm.backends.fake import CompletedWork, FakeWorld
from meshwright.comm.collectives.group import Work
from meshwright.engine.runtime.async_copies import HostCopy
from meshwright.engine.runtime.build_module import make_trained_module
from meshwright.engine.runtime.rank_state import RankState
from meshwright.engine.step.executor import StepExecutor
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.model.loss.token_cross_entropy import token_cross_entropy
from meshwright.parallel.context.ring import RingAttention
from meshwright.parallel.context.ulysses import Ulysses
from meshwright.parallel.data.ddp import DDP
from meshwright.parallel.data.zero import ZeRO
from meshwright.plan.job.data_config import DataConfig
from meshwright.plan.job.job import Job, PrecisionConfig, TrainConfig
from meshwright.plan.job.model_config import ModelConfig
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.strategy_interface import Strategy
from meshwright.verifier.message_trace import answer_reads

NAME = "host_reads"
CLAIM = "a training step without a guard never waits for what it has launched"
LIMIT = 0
DEVICE = torch.device("cuda", 0)
HALF = PrecisionConfig("bfloat16", "bfloat16", "bfloat16")
CASES = (
    Case(ZeRO(), 1),
    Case(ZeRO(), 3, num_micro=1),
    Case(ZeRO(), 3, num_micro=8),
    Case(ZeRO(gather="step"), 3, num_micro=4, precision=HALF),
    Case(ZeRO(stage=1), 3, num_micro=8, precision=HALF),
    Case(ZeRO(stage=2), 3, num_micro=8, precision=PrecisionConfig(compute="bfloat16")),
    Case(ZeRO(replicate_axis="dp_replicate"), 2, 2, num_micro=4),
)


@dataclass(frozen=True)
class GroupedHeads:
    """A Llama whose four heads share two keys and values, under a strategy over four ranks along `cp`."""

    strategy: Strategy
    num_micro: int = 2

    @property
    def analyzed(self) -> AnalyzedModel:
        """The analyzed model."""
        sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        config = LlamaConfig(vocab_size=VOCABULARY, use_cache=False, **sizes, **heads)
        return analyze(lambda: LlamaForCausalLM(config), random_samples(2), loss=token_cross_entropy())

    def plan(self) -> Plan:
        """Returns the plan."""
        data, train = DataConfig("example", sequence=TOKENS), TrainConfig(batch=self.num_micro)
        job, strategies = Job(ModelConfig("llama"), data, train), (self.strategy, DDP(axis="cp"))
        return make_plan(self.analyzed, job, Mesh(cp=4), strategies, 1)

    def __str__(self) -> str:
        return f"{self.strategy.name}, 4 ranks, {self.num_micro} micro, float32"


ALL_CASES: tuple[Case | GroupedHeads, ...] = (
    *CASES,
    GroupedHeads(RingAttention()),
    GroupedHeads(Ulysses()),
)


def count_in_subprocess(names: Sequence[str] = ()) -> dict[str, dict[str, dict[str, int]]]:
    """Returns the reads and waits of each case, or of `names` alone, from a process with the guard."""
    return json.loads(run_with_fake_cuda(["-m", "benchmarks.models.host_reads", "--count", *names]))


class ReadCounter(TorchDispatchMode):
    """While active (`with`), counts the reads of the device by their place in the library.

    `tolist` of a tensor is a read per number here, and one on a device.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reads: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        is_read = func is torch.ops.aten._local_scalar_dense.default and args[0].device.type == DEVICE.type
        if is_read or is_blocking_copy(func, args, kwargs):
            self.reads[_place()] += 1
        return func(*args, **kwargs)


def _place() -> str:
    """Returns the line of the library that runs."""
    frames = [frame for frame in traceback.extract_stack() if f"{os.sep}meshwright{os.sep}" in frame.filename]
    place = next(frame for frame in reversed(frames) if "message_trace" not in frame.filename)
    return f"{Path(place.filename).name}: {place.line}"


def is_blocking_copy(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Returns whether `func` copies between host and device, and returns when the device has done it."""
    if func is torch.ops.aten._to_copy.default:
        source, target, non_blocking = args[0].device, kwargs.get("device"), kwargs.get("non_blocking", False)
        target = source if target is None else torch.device(target)
    elif func is torch.ops.aten.copy_.default:
        source, target, non_blocking = args[1].device, args[0].device, (args[2] if len(args) > 2 else False)
    else:
        return False
    return source.type != target.type and not (non_blocking or kwargs.get("non_blocking", False))


def count_reads(case: Case | GroupedHeads) -> dict[str, dict[str, int]]:
    """Returns the reads and the waits of the second step of rank 0 of `case`, by place; needs the guard."""
    plan, mode = case.plan(), FakeTensorMode(allow_non_fake_inputs=True)
    dtype = getattr(torch, plan.job.precision.parameters)
    analyzed = analyzed_model(case.model) if isinstance(case, Case) else case.analyzed
    module = make_trained_module(analyzed, DEVICE, dtype, mode)
    counter, waits, values = ReadCounter(), Counter[str](), HostCopy.values

    def count_wait(copy: HostCopy) -> list[float]:
        waits[_place()] += 1
        return values(copy)

    with ExitStack() as stack:
        stack.enter_context(mode)
        stack.enter_context(answer_reads(module.module))
        stack.enter_context(counter)
        stack.enter_context(patch.object(HostCopy, "values", count_wait))
        works: dict[str, Work] = defaultdict(CompletedWork)
        state = RankState(module, FakeWorld(plan.mesh, 0, DEVICE), token_cross_entropy(), works=works)
        executor = StepExecutor(plan.for_rank(0), state)
        batch = random_samples(len(plan.samples_read(0)))
        executor.step(batch)
        counter.reads.clear()
        waits.clear()
        executor.step(batch)
        found = {"reads": dict(counter.reads), "waits": dict(waits)}
        executor.close()
    return found


def result(found: Mapping[str, Mapping[str, Mapping[str, int]]]) -> Result:
    """Returns the result of all cases: how many steps read nothing of the device."""
    values = [float(sum(counts["reads"].values())) for counts in found.values()]
    detail = {"by place": {name: dict(counts) for name, counts in found.items()}}
    return Result.of_count(NAME, CLAIM, values, limit=LIMIT, bar=len(values), detail=detail)


def main() -> None:
    """Count, and write the result; with `--count`, in a process that has the guard, print the reads."""
    if "--count" not in sys.argv:
        print(result(count_in_subprocess()).write(NAME))
        return
    # the CPU build of torch has no CUDA to initialize, and attention asks for the kind of GPU
    torch.cuda._lazy_init = lambda: None
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    names = sys.argv[sys.argv.index("--count") + 1 :]
    cases = [case for case in ALL_CASES if not names or str(case) in names]
    print(json.dumps({str(case): count_reads(case) for case in cases}))
    end_process()


if __name__ == "__main__":
    main()
