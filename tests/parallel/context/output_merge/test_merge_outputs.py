"""The merge of the attention to two sets of keys."""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.parallel.context.output_merge.merge_outputs import merge_outputs


def test_two_empty_blocks_merge_to_an_empty_one_and_nan_stays_nan() -> None:
    never, out = torch.full((1, 1, 2), float("-inf")), torch.zeros(1, 1, 2, 3)
    merged, lse = merge_outputs(out, never, out, never)
    assert merged.eq(0).all()
    assert lse.eq(float("-inf")).all()
    assert merge_outputs(out, never, out + float("nan"), never * 0)[0].isnan().all()


class Kernels(TorchDispatchMode):
    """The operations that launch a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view:
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **kwargs or {})


def test_a_block_is_merged_in_place_by_six_kernels() -> None:
    out, lse = torch.zeros(1, 2, 8, 4), torch.full((1, 2, 8), float("-inf"))
    more, more_lse = torch.randn(1, 2, 3, 4).bfloat16(), torch.randn(1, 2, 3)
    rows = slice(None), slice(None), slice(2, 5)
    with Kernels() as kernels:
        merge_outputs(out[rows], lse[rows], more, more_lse)
    assert kernels.names == ["sub", "sigmoid_", "nan_to_num_", "_to_copy", "lerp", "logaddexp"]
    assert torch.equal(out[rows], more.float())
    assert torch.equal(lse[rows], more_lse)
    assert not out[:, :, :2].any()


def test_on_a_device_it_is_one_operator() -> None:
    with FakeTensorMode():
        out, lse = torch.empty(1, 2, 8, 4, device="cuda"), torch.empty(1, 2, 8, device="cuda")
        with Kernels() as kernels:
            merge_outputs(out, lse, out.bfloat16(), lse)
    assert kernels.names == ["_to_copy", "merge_outputs_"]
