"""The GPUs of a host, as the doctor reports them."""

import torch

from meshwright.run.doctor.gpu_checks import gpu_findings
from tests.device.fake_accelerator import fake_accelerator


def test_the_gpus_are_one_finding():
    finding = next(gpu_findings())
    assert (finding.name, finding.level) == ("GPUs", "ok")
    assert torch.accelerator.is_available() or "gloo" in finding.text


def test_the_dtype_that_takes_tensor_cores_is_proposed(monkeypatch):
    fake_accelerator(monkeypatch, count=1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H100")
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 29))
    for supported in (True, False):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda supported=supported, **options: supported)
        found = [finding.text for finding in gpu_findings()]
        assert 'precision.compute = "bfloat16"' in found[-1] if supported else len(found) == 1
