"""What fp8 cannot compute is refused by name, before a process starts; torchao is not needed for that."""

import pytest
import torch

from meshwright.device import local_device
from meshwright.parallel.memory.tiled_mlp import TiledMLP
from meshwright.parallel.pipeline.pipeline_strategy import Pipeline
from meshwright.parallel.precision import fp8
from meshwright.parallel.precision.fp8 import Float8Products
from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.precision import PrecisionConfig
from meshwright.plan.sharding.mesh import Mesh
from tests.parallel.precision.small_llama import analyzed_llama, plan_of


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if torchao were installed."""
    monkeypatch.setattr(fp8, "torchao_fault", lambda: "")


def refusal(*given: object, **more: object) -> str:
    with pytest.raises(PlanError) as refused:
        plan_of(*given, **more)
    return str(refused.value)


def test_a_missing_torchao_is_refused_with_its_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fp8, "find_spec", lambda name: None)
    text = refusal(Mesh(), Float8Products())
    assert "fp8 computes by torchao, which is not installed" in text
    assert 'pip install "meshwright[fp8]"' in text


@pytest.mark.usefixtures("installed")
def test_sizes_that_are_no_multiples_of_16_are_refused_by_layer():
    odd = analyzed_llama(intermediate_size=40)
    text = refusal(Mesh(), Float8Products(), analyzed=odd)
    assert "'model.layers.0.mlp.gate_proj' has a weight of 40 x 32, and 5 more" in text
    patterns = [f"model.layers.*.mlp.{name}_proj" for name in ("gate", "up", "down")]
    assert "exclude = [{}]".format(", ".join(f'"{each}"' for each in patterns)) in text
    plan_of(Mesh(), Float8Products(exclude=tuple(patterns)), analyzed=odd)


@pytest.mark.usefixtures("installed")
def test_patterns_select_layers_and_one_without_a_layer_is_refused():
    model_spec = analyzed_llama().model_spec
    assert len(Float8Products().selected(model_spec)) == 14
    selected = Float8Products(layers=("*.mlp.*",), exclude=("*.1.*", "*.up_proj")).selected(model_spec)
    assert list(selected) == ["model.layers.0.mlp.gate_proj", "model.layers.0.mlp.down_proj"]
    text = refusal(Mesh(), Float8Products(layers=("*.mpl.*", "*.mlp.*"), exclude=("lm_head",)))
    assert "'*.mpl.*' matches no linear layer between embedding and head" in text
    assert "'lm_head' matches no linear layer" in text
    assert "fp8 would change nothing" in refusal(Mesh(), Float8Products(exclude=("*",)))


@pytest.mark.usefixtures("installed")
def test_what_does_not_go_with_it_is_refused():
    half = PrecisionConfig(compute="float16")
    assert "compute in float16, whose loss scale" in refusal(Mesh(), Float8Products(), precision=half)
    assert "split" in refusal(
        Mesh(pp=2), Float8Products(), strategies=(Pipeline(schedule="zb_h1"),), micro_batch=3
    )
    text = refusal(Mesh(tp=2), Float8Products())
    assert "fp8 does not work with tensor_parallel: it slices layers over ranks" in text
    assert "the weight of 'model.layers.0.self_attn.q_proj' is sliced" in text
    assert "fp8 does not work with tiled_mlp: a tile" in refusal(Mesh(), Float8Products(), TiledMLP())
    assert "tensorwise takes a scale over the tokens" in refusal(Mesh(cp=2), Float8Products("tensorwise"))
    plan_of(Mesh(cp=2), Float8Products())


@pytest.mark.usefixtures("installed")
def test_a_gpu_without_float8_is_refused_by_its_name(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(local_device, "local_platform", lambda: local_device.CUDA)
    monkeypatch.setattr(local_device, "own_device", lambda: torch.device("cuda:0"))
    monkeypatch.setattr(local_device, "device_name", lambda device: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    text = local_device.float8_fault()
    assert text == "NVIDIA A100 has compute capability 8.0, and float8 begins with 8.9"
    monkeypatch.setattr(fp8, "float8_fault", lambda: text)
    assert text in refusal(Mesh(), Float8Products())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert local_device.float8_fault() == ""
    monkeypatch.setattr(local_device, "local_platform", lambda: local_device.XPU)
    assert local_device.float8_fault() == "float8 on XPU, where it was not tried"
