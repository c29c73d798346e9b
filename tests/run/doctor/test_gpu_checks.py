"""The GPUs of a host, as the doctor reports them."""

import pytest
import torch

from meshwright.device.platforms import CPU, CUDA
from meshwright.run.doctor import gpu_checks
from meshwright.run.doctor.gpu_checks import gpu_findings, variable_findings
from tests.device.fake_accelerator import fake_accelerator


def test_the_gpus_are_one_finding():
    finding = next(gpu_findings({}))
    assert (finding.name, finding.level) == ("GPUs", "ok")
    assert torch.accelerator.is_available() or "gloo" in finding.text


def test_variables_that_fragment_memory_or_serialize_streams_are_warnings():
    (allocator,) = variable_findings({})
    assert allocator.level == "warning"
    assert allocator.fix == "export PYTORCH_ALLOC_CONF=expandable_segments:True"
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        set_well = {
            name: "max_split_size_mb:512,expandable_segments:True",
            "CUDA_DEVICE_MAX_CONNECTIONS": "8",
        }
        assert [each.level for each in variable_findings(set_well)] == ["ok"]
    _, streams = variable_findings({"CUDA_DEVICE_MAX_CONNECTIONS": "1"})
    assert streams.level == "warning"
    assert "unset it" in streams.fix


def test_the_dtype_that_takes_tensor_cores_is_proposed(monkeypatch):
    fake_accelerator(monkeypatch, count=1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H100")
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 29))
    for supported in (True, False):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda supported=supported, **options: supported)
        found = [finding.text for finding in gpu_findings({})]
        assert any('precision.compute = "bfloat16"' in text for text in found) == supported


def test_gpus_that_torch_does_not_see_are_a_warning(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gpu_checks, "local_platform", lambda: CPU)
    monkeypatch.setattr(gpu_checks, "unseen_platform", lambda: CUDA)
    (finding,) = gpu_findings({})
    assert (finding.level, "devices of CUDA" in finding.text) == ("warning", True)
    assert "unset CUDA_VISIBLE_DEVICES" in finding.fix
