"""Autocast by the rules of accelerators, on tensors of the CPU."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  the field's name

from benchmarks.harness.cuda_guard import run_with_fake_cuda, why_no_fake_cuda
from meshwright.model.trial.accelerator_autocast import FLOAT32_NAMES, trial_autocast

X = torch.rand(4, 4)
HALF = X.bfloat16()
FORWARDS = {
    "matrix product": (lambda x: x @ X, torch.bfloat16, torch.bfloat16),
    "softmax": (lambda x: F.softmax(x, -1), torch.bfloat16, torch.float32),
    "softmax, dtype": (lambda x: x.softmax(-1, dtype=torch.bfloat16), torch.bfloat16, torch.bfloat16),
    "layer norm": (torch.nn.LayerNorm(4), torch.bfloat16, torch.float32),
    "operator": (lambda x: x**2, torch.bfloat16, torch.float32),
    "sum": (lambda x: x.sum(), torch.bfloat16, torch.float32),
    "other": (F.gelu, torch.bfloat16, torch.bfloat16),
}


@pytest.mark.parametrize(("forward", "on_cpu", "on_gpu"), FORWARDS.values(), ids=FORWARDS)
def test_results_have_the_dtype_of_the_device(forward, on_cpu: torch.dtype, on_gpu: torch.dtype):
    for device, expected in (("cpu", on_cpu), ("cuda", on_gpu)):
        with trial_autocast(torch.bfloat16, device):
            assert forward(HALF).dtype == expected
            with torch.autocast("cpu", enabled=False):
                assert (HALF**2).dtype == torch.bfloat16, "the model switched it off"
        assert not torch.is_autocast_enabled("cpu")
    assert (HALF**2).dtype == torch.bfloat16


RULES = """
import inspect
import warnings

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from benchmarks.harness.cuda_guard import end_process
from benchmarks.harness.fake_device import pretend_cuda
from meshwright.model.trial.accelerator_autocast import NAMESPACES

pretend_cuda()
warnings.simplefilter("ignore")
torch._logging.set_logs(all=50)
LEFT_OUT = {"backward", "empty", "import_ir_module", "load", "rand", "save", "seed", "set_default_device",
            "set_default_dtype", "set_num_interop_threads", "set_num_threads", "tensor", "while_loop", "cond"}

def dtype_of(function, device):
    x = lambda *shape: torch.rand(*shape, dtype=torch.bfloat16, device=device)
    attempts = ((x(4, 4),), (x(4, 4), x(4, 4)), (x(4, 4), 1), (x(4, 4), -1), (x(4, 4), (4,)), (x(2, 4, 4), 2),
                (x(4, 4),) * 3, (x(4, 4), 2, 0, 3), (x(2, 3, 4, 4), 2), (x(4, 4), x(4, 4), x(4)))
    for attempt in attempts:
        try:
            result = function(*attempt)
        except BaseException:
            continue
        result = result[0] if isinstance(result, (tuple, list)) else result
        if isinstance(result, torch.Tensor) and result.is_floating_point():
            return result.dtype

found = set()
with FakeTensorMode(allow_non_fake_inputs=True):
    for space in NAMESPACES:
        for name in sorted(set(dir(space)) - LEFT_OUT):  # in another order some run into each other
            function = getattr(space, name)
            is_public = not name.startswith("_") and not name.endswith("_") or name in ("__pow__", "__rpow__")
            if not is_public or not callable(function) or inspect.isclass(function):
                continue
            dtypes = []
            for device in ("cpu", "cuda"):
                with torch.autocast(device, dtype=torch.bfloat16, cache_enabled=False):
                    dtypes.append(dtype_of(function, device))
            if dtypes[1] == torch.float32 != dtypes[0]:
                found.add(name)
print(*sorted(found))
end_process()
"""


@pytest.mark.skipif(why_no_fake_cuda() != "", reason=why_no_fake_cuda())
def test_the_table_has_the_functions_that_cuda_runs_in_float32_and_the_cpu_does_not():
    assert set(run_with_fake_cuda(["-c", RULES]).splitlines()[-1].split()) == FLOAT32_NAMES
