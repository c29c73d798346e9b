"""The table of devices: complete, and of one meaning for each type of torch."""

import pytest
import torch

from meshwright.device.platforms import ACCELERATOR_BACKENDS, DEVICE_TYPES, PLATFORMS, Platform


@pytest.mark.parametrize("platform", PLATFORMS, ids=lambda platform: platform.name)
def test_torch_knows_its_type_and_its_backend(platform: Platform):
    assert torch.device(platform.type).type == platform.type
    assert torch.amp.is_autocast_available(platform.type)
    backends = torch.distributed.Backend.default_device_backend_map
    assert platform.backend is None or backends[platform.type] == platform.backend


def test_devices_of_one_type_have_one_backend():
    assert DEVICE_TYPES == ("cpu", "cuda", "xpu", "mps")
    assert ACCELERATOR_BACKENDS == ("nccl", "xccl")
    assert len({(platform.type, platform.backend) for platform in PLATFORMS}) == len(DEVICE_TYPES)
