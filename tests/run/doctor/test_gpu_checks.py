"""The GPUs of a host, as the doctor reports them."""

from types import SimpleNamespace

import torch

from meshwright.run.doctor.gpu_checks import gpu_findings


def test_the_gpus_are_one_finding():
    finding = next(gpu_findings())
    assert (finding.name, finding.level) == ("GPUs", "ok")
    assert torch.cuda.is_available() or "gloo" in finding.text


def test_the_dtype_that_takes_tensor_cores_is_proposed(monkeypatch):
    answers = {
        "is_available": True,
        "device_count": 1,
        "get_device_name": "H100",
        "get_device_properties": SimpleNamespace(total_memory=80 * 2**30),
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda *args, answer=answer: answer)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 29))
    for supported in (True, False):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda supported=supported, **options: supported)
        found = [finding.text for finding in gpu_findings()]
        assert 'precision.compute = "bfloat16"' in found[-1] if supported else len(found) == 1
