"""A rank with a tensor on the wrong device is found, in a process of its own."""

import pytest

from benchmarks.harness.cuda_guard import run_with_fake_cuda, why_no_fake_cuda

PLANTED = """
import torch
from benchmarks.fake_devices import rank_on_fake_cuda
from benchmarks.harness.cuda_guard import end_process
from benchmarks.harness.fake_device import pretend_cuda
from meshwright.api import analyze, make_plan
from meshwright.engine.params.flat_param_store import FlatParamStore
from meshwright.model.loss.loss_definition import Loss
from meshwright.plan.job.job import Job, TrainConfig

pretend_cuda()

class Net(torch.nn.Linear):
    table = False

    def forward(self, x):
        return super().forward(x) + torch.arange(2.0, device="cpu" if self.table else x.device)

loss = Loss(lambda outputs, batch: outputs.sum(), lambda batch: torch.tensor(1.0), targets=())
analyzed = analyze(lambda: Net(3, 2), {"x": torch.ones(2, 3)}, loss=loss)
plan = make_plan(analyzed, Job(train=TrainConfig(batch=2)))
counts = rank_on_fake_cuda.count_rank(analyzed, plan, 0)
print(*counts, counts["step"][1:])

def count(wrong):
    try:
        rank_on_fake_cuda.count_rank(analyzed, plan, 0)
    except (AssertionError, RuntimeError) as error:
        print(wrong, type(error).__name__, str(error).splitlines()[0])

Net.table = True
count("operand:")
Net.table = False
trained = rank_on_fake_cuda.Trainer.step

def step(self, batch):
    trained(self, batch)
    self.module.register_buffer("seen", torch.ones(2))

rank_on_fake_cuda.Trainer.step = step
count("buffer:")
end_process()
"""


@pytest.mark.skipif(why_no_fake_cuda() != "", reason=why_no_fake_cuda())
def test_an_operand_or_a_buffer_on_the_wrong_device_is_found():
    assert run_with_fake_cuda(["-c", PLANTED]).splitlines() == [
        "build first step step evaluation save restore [0, 2, 0]",
        "operand: FakeTensorDeviceMismatchError Expected all tensors to be on the same device, but found at "
        "least two devices, cuda:0 and cpu!",
        "buffer: AssertionError not on cuda:0: seen",
    ]
