"""Which device a process trains on, and what is refused, on hosts that are faked."""

import logging
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from meshwright.device import local_device
from meshwright.device.local_device import (
    backend_version,
    device_diagnostics,
    device_name,
    device_of_rank,
    fused_attention_capability,
    has_bfloat16_products,
    local_platform,
    num_accelerators,
    own_device,
    own_device_diagnostics,
    platform_of,
    target_platform,
    unseen_platform,
    use_device,
)
from meshwright.device.platforms import CPU, CUDA, MPS, ROCM, XPU, Platform
from meshwright.plan.job.errors import PlanError
from tests.device.fake_accelerator import GIB, fake_accelerator


@pytest.mark.parametrize(("device_type", "platform"), [("cuda", CUDA), ("xpu", XPU), ("mps", MPS)])
def test_a_process_trains_on_the_accelerator_that_it_sees(
    monkeypatch: pytest.MonkeyPatch, device_type: str, platform: Platform
):
    fake_accelerator(monkeypatch, device_type, count=4, current=2)
    assert (local_platform(), num_accelerators(), own_device()) == (platform, 4, torch.device(device_type, 2))


def test_a_plan_is_for_the_accelerator_that_it_names_or_for_what_this_host_has(
    monkeypatch: pytest.MonkeyPatch,
):
    assert (target_platform(""), target_platform("a laptop"), target_platform("h100")) == (CPU, CPU, CUDA)
    fake_accelerator(monkeypatch, "xpu")
    assert (target_platform(""), target_platform("h100")) == (XPU, CUDA)


def test_amd_gpus_have_the_type_of_cuda_and_variables_of_their_own(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.version, "cuda", None)
    fake_accelerator(monkeypatch)
    assert local_platform() == ROCM
    assert fused_attention_capability(torch.device("cuda")) is None
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 22, 3))
    assert backend_version(ROCM) == "ROCm 6.4, RCCL 2.22.3"


def test_without_an_accelerator_it_trains_on_the_cpu_and_says_so_if_torch_was_built_for_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(local_device, "unseen_platform", lambda: None)
    assert (own_device(), num_accelerators(), device_of_rank(7, every_visible=True)) == (
        torch.device("cpu"),
        0,
        torch.device("cpu"),
    )
    assert not caplog.records
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    fake_accelerator(monkeypatch, count=0)
    assert (own_device(), local_platform()) == (torch.device("cpu"), CPU)
    assert device_of_rank(0, every_visible=True) == torch.device("cpu")
    said = "training on the CPU: this torch is for CUDA and sees none (CUDA_VISIBLE_DEVICES may hide it)"
    assert [record.message for record in caplog.records] == [said] * 2


def test_devices_that_torch_does_not_see_are_known_by_their_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    file = tmp_path / "device0"
    monkeypatch.setattr(local_device, "PLATFORMS", (CPU, replace(CUDA, device_file=str(file))))
    fake_accelerator(monkeypatch, count=0)
    assert unseen_platform() is None
    file.touch()
    assert unseen_platform() is local_device.PLATFORMS[1]
    fake_accelerator(monkeypatch, count=1)
    assert unseen_platform() is None


@pytest.mark.parametrize(
    ("variable", "given"), [("9,10", r" \(CUDA_VISIBLE_DEVICES names 9, 10\)"), (None, "")], ids=str
)
def test_a_host_whose_gpus_are_not_seen_does_not_train_on_the_cpu_unasked(
    monkeypatch: pytest.MonkeyPatch, variable: str | None, given: str
):
    fake_accelerator(monkeypatch, count=0)
    monkeypatch.setattr(local_device, "unseen_platform", lambda: CUDA)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if variable is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    said = rf"devices of CUDA \(/dev/nvidia0\), and torch sees none{given}\n.*name devices that exist"
    for choose in (own_device, lambda: device_of_rank(1, every_visible=True)):
        with pytest.raises(PlanError, match=said) as refused:
            choose()
        assert "CUDA_VISIBLE_DEVICES= (empty) to train on the CPU" in str(refused.value)


@pytest.mark.parametrize("variable", ["", "-1"])
def test_hidden_on_purpose_they_are_left_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, variable: str
):
    fake_accelerator(monkeypatch, count=0)
    monkeypatch.setattr(local_device, "unseen_platform", lambda: CUDA)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    assert own_device() == torch.device("cpu")
    assert not caplog.records


def test_a_torch_for_cpus_on_a_host_with_gpus_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: None)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(local_device, "unseen_platform", lambda: CUDA)
    assert own_device() == torch.device("cpu")
    assert "this torch is for CPUs alone, and the host has CUDA" in caplog.text


def test_an_accelerator_of_another_kind_is_refused_by_name(monkeypatch: pytest.MonkeyPatch):
    fake_accelerator(monkeypatch, "hpu")
    with pytest.raises(
        PlanError, match=r"a device of type 'hpu', which is not supported\n.*CPU, CUDA, ROCm, XPU, MPS"
    ):
        local_platform()


def test_a_rank_takes_the_gpu_of_its_number_or_the_only_one_that_it_sees(monkeypatch: pytest.MonkeyPatch):
    fake_accelerator(monkeypatch, count=4)
    assert device_of_rank(3, every_visible=True) == torch.device("cuda", 3)
    fake_accelerator(monkeypatch, count=1)
    assert device_of_rank(3, every_visible=False) == torch.device("cuda", 0)


@pytest.mark.parametrize(("visible", "every_visible"), [(1, True), (2, False)])
@pytest.mark.parametrize(
    ("device_type", "repair"), [("cuda", "CUDA_VISIBLE_DEVICES="), ("xpu", "ZE_AFFINITY_MASK=")]
)
def test_more_ranks_than_gpus_are_refused(
    monkeypatch: pytest.MonkeyPatch, visible: int, every_visible: bool, device_type: str, repair: str
):
    fake_accelerator(monkeypatch, device_type, count=visible)
    text = rf"rank 3 of this host needs a GPU of its own, and {visible} are visible\n.*{repair} \(empty\)"
    with pytest.raises(PlanError, match=text):
        device_of_rank(3, every_visible=every_visible)


def test_more_ranks_than_gpus_are_refused_before_they_start(monkeypatch: pytest.MonkeyPatch):
    assert not list(own_device_diagnostics(100))
    fake_accelerator(monkeypatch, count=2)
    assert not list(own_device_diagnostics(2))
    (found,) = own_device_diagnostics(3)
    assert "3 ranks of this host need a GPU of their own each, and 2 are visible" in found.problem
    assert found.fix == "start at most 2; or CUDA_VISIBLE_DEVICES= (empty) to train on the CPU"


def test_the_cpu_needs_no_use_and_a_gpu_becomes_the_current_one(monkeypatch: pytest.MonkeyPatch):
    chosen = fake_accelerator(monkeypatch)
    use_device(torch.device("cpu"))
    assert chosen == []
    use_device(torch.device("cuda", 3))
    assert chosen == [torch.device("cuda", 3)]


@pytest.mark.parametrize(
    ("said", "problem", "repair"),
    [
        (
            "CUDA error: CUDA-capable device(s) is/are busy or unavailable\nCompile with",
            r"another process has cuda:1, and its compute mode allows one at a time: .*unavailable$",
            "nvidia-smi -c DEFAULT",
        ),
        ("CUDA error: out of memory", "cuda:1 has no memory left", "end the processes that have it"),
        ("CUDA error: unknown error", "cuda:1 cannot be used: CUDA error: unknown", "CUDA_VISIBLE_DEVICES="),
    ],
)
def test_a_gpu_that_its_driver_refuses_is_refused_with_the_repair(
    monkeypatch: pytest.MonkeyPatch, said: str, problem: str, repair: str
):
    def refuse(device: object) -> tuple[int, int]:
        raise RuntimeError(said)

    fake_accelerator(monkeypatch, memory_info=refuse)
    with pytest.raises(PlanError) as refused:
        use_device(torch.device("cuda", 1))
    (diagnostic,) = refused.value.diagnostics
    assert re.search(problem, diagnostic.problem)
    assert repair in diagnostic.fix


def test_a_gpu_whose_memory_others_have_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    fake_accelerator(monkeypatch, memory_info=lambda device: (79 * GIB, 80 * GIB))
    use_device(torch.device("cuda", 0))
    assert not caplog.records
    fake_accelerator(monkeypatch, memory_info=lambda device: (3 * GIB, 80 * GIB))
    with caplog.at_level(logging.WARNING):
        use_device(torch.device("cuda", 0))
    assert "cuda:0: 3 GiB of 80 GiB are free, other processes have the rest" in caplog.text


def test_several_ranks_and_float64_are_refused_on_mps_and_nothing_elsewhere():
    several, wide = device_diagnostics(MPS, 2, ("float32", "float64"))
    assert (several.problem, several.fix) == (
        "2 ranks on MPS, and torch.distributed has no backend for it",
        "train with one rank, or on a host with other devices",
    )
    assert (wide.problem, wide.fix) == ("float64 on MPS, which does not have it", 'write "float32"')
    assert not list(device_diagnostics(MPS, 1, ("float32",)))
    for platform in (CPU, CUDA, ROCM, XPU):
        assert not list(device_diagnostics(platform, 1000, ("float32", "float64")))


def test_devices_without_a_name_have_that_of_their_type(monkeypatch: pytest.MonkeyPatch):
    assert (device_name(torch.device("cpu")), device_name(torch.device("mps"))) == ("cpu", "mps")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"name of {device}")
    assert device_name(torch.device("cuda", 1)) == "name of cuda:1"


def test_versions_are_those_of_the_kind_and_of_its_library(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.version, "xpu", "20250302", raising=False)
    assert (backend_version(XPU), backend_version(MPS)) == ("XPU 20250302, oneCCL", "MPS of unknown version")


def test_fused_attention_is_asked_of_cuda_alone(monkeypatch: pytest.MonkeyPatch):
    assert fused_attention_capability(torch.device("cpu")) is None
    assert fused_attention_capability(torch.device("meta")) is None
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert fused_attention_capability(torch.device("cuda", 0)) == (9, 0)
    assert fused_attention_capability(torch.device("xpu", 0)) is None


def test_the_kind_of_a_device_is_that_of_its_type():
    assert (platform_of(torch.device("cpu")), platform_of(torch.device("cuda", 3))) == (CPU, CUDA)


def test_products_in_bfloat16_are_asked_of_cuda_and_known_of_others(monkeypatch: pytest.MonkeyPatch):
    assert not has_bfloat16_products()
    for device_type, expected in (("cuda", True), ("xpu", True), ("mps", False)):
        fake_accelerator(monkeypatch, device_type)
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **options: True)
        assert has_bfloat16_products() is expected
