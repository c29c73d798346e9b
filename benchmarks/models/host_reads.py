"""Reads of the device by the host in one training step, counted on fake CUDA tensors.

A read (`.item()`, `.tolist()`, a copy to the CPU) waits for all that the device still has to do, and nothing
is launched meanwhile. One rank is simulated; its second step runs forward, backward and optimizer on fake
CUDA tensors in a CPU build of torch. A device guard that does nothing (benchmarks/harness/noop_cuda.cpp) lets
autograd run on them, on a thread of its own, as on a GPU.

    TOKEN_COUNT    one read of the global count; LOSS needs it
    metrics        one of the gradient norm and one of the loss, after the optimizer has been launched

Batches are on the CPU, as a data loader makes them: what counts in them is no read of the device. Before, a
step read the count of each microbatch, and the norm before the optimizer: 4 reads, and one per microbatch.
The aim is none; until then the claim is about the two reads that are left at the end, and the one between.
"""

import json
import os
import sys
import traceback
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.data_parallel.small_llamas import Case, analyzed_model, random_samples
from benchmarks.harness.fake_cuda import end_process, run_with_fake_cuda
from benchmarks.harness.result import Result
from meshwright.comm.backends.fake import CompletedWork, FakeWorld
from meshwright.comm.collectives.group import Work
from meshwright.engine.runtime.build_module import make_trained_module
from meshwright.engine.runtime.rank_state import RankState, TrainedModule
from meshwright.engine.step.executor import StepExecutor
from meshwright.model.loss.token_cross_entropy import token_cross_entropy
from meshwright.parallel.data.zero import ZeRO
from meshwright.plan.job.job import PrecisionConfig
from meshwright.verifier.message_trace import answer_reads

NAME = "host_reads"
CLAIM = "a training step without a guard reads the device three times, however many microbatches it has"
LIMIT = 3
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


def count_in_subprocess(names: Sequence[str] = ()) -> dict[str, dict[str, int]]:
    """Returns the reads of each case (or of `names` alone) by place, from a process with the guard."""
    return json.loads(run_with_fake_cuda(["-m", "benchmarks.models.host_reads", "--count", *names]))


class ReadCounter(TorchDispatchMode):
    """While active (`with`), counts the reads of the device by their place in the library.

    The numbers of a tensor that `tolist` returns are one read.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reads: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        to_host = func is torch.ops.aten._to_copy.default and kwargs.get("device") == torch.device("cpu")
        reads = func is torch.ops.aten._local_scalar_dense.default
        if (reads or to_host) and args[0].device.type == DEVICE.type:
            frames = [f for f in traceback.extract_stack() if f"{os.sep}meshwright{os.sep}" in f.filename]
            place = next(frame for frame in reversed(frames) if "message_trace" not in frame.filename)
            self.reads[f"{Path(place.filename).name}: {place.line}"] += 1
        return func(*args, **kwargs)


def count_reads(case: Case) -> dict[str, int]:
    """Returns the reads of the second step of rank 0 of `case`, by place; needs the guard."""
    plan, mode = case.plan(), FakeTensorMode(allow_non_fake_inputs=True)
    dtype = getattr(torch, plan.job.precision.parameters)
    module = _on_device(make_trained_module(analyzed_model(case.model), DEVICE, dtype, mode), mode)
    counter = ReadCounter()
    with ExitStack() as stack:
        stack.enter_context(mode)
        stack.enter_context(answer_reads(module.module))
        stack.enter_context(counter)
        works: dict[str, Work] = defaultdict(CompletedWork)
        state = RankState(module, FakeWorld(plan.mesh, 0, DEVICE), token_cross_entropy(), works=works)
        executor = StepExecutor(plan.for_rank(0), state)
        batch = random_samples(len(plan.samples_read(0)))
        executor.step(batch)
        counter.reads.clear()
        executor.step(batch)
        found = dict(counter.reads)
        executor.close()
    return {place: 1 if ".tolist()" in place else reads for place, reads in found.items()}


def _on_device(trained_module: TrainedModule, mode: FakeTensorMode) -> TrainedModule:
    """Returns the module with parameters and buffers that are fake tensors of the device."""
    moved: dict[int, nn.Parameter] = {}

    def move(parameter: nn.Parameter) -> nn.Parameter:
        if id(parameter) not in moved:
            values = torch.empty(parameter.shape, dtype=parameter.dtype, device=DEVICE)
            moved[id(parameter)] = nn.Parameter(values, parameter.requires_grad)
        return moved[id(parameter)]

    with mode:
        for module in trained_module.module.modules():
            for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                module.register_parameter(name, move(parameter))
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, torch.empty(buffer.shape, dtype=buffer.dtype, device=DEVICE))
        parameters = {name: move(parameter) for name, parameter in trained_module.parameters.items()}
    return replace(trained_module, parameters=parameters)


def result(found: Mapping[str, Mapping[str, int]]) -> Result:
    """Returns the result of all cases: how many read the device at most three times a step."""
    values = [float(sum(reads.values())) for reads in found.values()]
    detail = {"reads by place": {name: dict(reads) for name, reads in found.items()}}
    return Result.of_count(NAME, CLAIM, values, limit=LIMIT, bar=len(values), detail=detail)


def main() -> None:
    """Count, and write the result; with `--count`, in a process that has the guard, print the reads."""
    if "--count" not in sys.argv:
        print(result(count_in_subprocess()).write(NAME))
        return
    # the CPU build of torch has no CUDA to initialize
    torch.cuda._lazy_init = lambda: None
    names = sys.argv[sys.argv.index("--count") + 1 :]
    cases = [case for case in CASES if not names or str(case) in names]
    print(json.dumps({str(case): count_reads(case) for case in cases}))
    end_process()


if __name__ == "__main__":
    main()
