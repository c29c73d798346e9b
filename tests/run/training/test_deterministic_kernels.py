"""Deterministic kernels are taken while the context is active, and not after it."""

import pytest
import torch

from meshwright.plan.job.errors import PlanError
from meshwright.run.training.deterministic_kernels import deterministic_kernels
from tests.device.fake_accelerator import fake_accelerator


def test_torch_and_the_environment_ask_for_deterministic_kernels(monkeypatch: pytest.MonkeyPatch):
    fake_accelerator(monkeypatch)
    variables: dict[str, str] = {}
    with deterministic_kernels(variables):
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.utils.deterministic.fill_uninitialized_memory
        with pytest.raises(RuntimeError, match="does not have a deterministic implementation"):
            torch.zeros(3).put_(torch.tensor([0]), torch.ones(1))
    assert variables == {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring"}
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory


def test_variables_of_the_user_stay():
    variables = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "NCCL_ALGO": "Tree"}
    given = dict(variables)
    with deterministic_kernels(variables):
        assert variables == given


def test_a_workspace_that_lets_cublas_add_in_any_order_is_refused():
    with (
        pytest.raises(
            PlanError, match=r"CUBLAS_WORKSPACE_CONFIG=:0:0 lets cuBLAS add in any order\n.*unset it"
        ),
        deterministic_kernels({"CUBLAS_WORKSPACE_CONFIG": ":0:0"}),
    ):
        pass
    assert not torch.are_deterministic_algorithms_enabled()
