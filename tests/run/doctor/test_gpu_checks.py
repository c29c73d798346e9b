"""The GPUs of a host, as the doctor reports them."""

import torch

from meshwright.run.doctor.gpu_checks import gpu_findings


def test_the_gpus_are_one_finding():
    (finding,) = gpu_findings()
    assert (finding.name, finding.level) == ("GPUs", "ok")
    assert torch.accelerator.is_available() or "gloo" in finding.text
