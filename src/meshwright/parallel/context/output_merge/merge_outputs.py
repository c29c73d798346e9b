"""Merges the attention of one block of keys into that of the blocks before it, in place.

    w = sigmoid(other_lse - lse)    out <- out + w (other_out - out)    lse <- log(exp(lse) + exp(other_lse))

On a GPU with Triton this is one kernel (triton_merge.py), so each output is read and written once; it has the
numbers of the operations of torch but for the rounding of exp and log. Elsewhere it is five operations, and
one more for outputs in half precision.
"""

import torch

from meshwright.device.local_device import has_triton

torch.library.define(
    "meshwright::merge_outputs_",
    "(Tensor(a!) out, Tensor(b!) lse, Tensor other_out, Tensor other_lse) -> ()",
)


def merge_outputs(
    out: torch.Tensor, lse: torch.Tensor, other_out: torch.Tensor, other_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merges the attention to other keys into `out` [B, H, n, e] and `lse` [B, H, n], and returns both.

    Views of the rows of a block may be passed: nothing is copied. Gradients do not pass through it.
    """
    if out.device.type == "cpu":
        _merge_eagerly(out, lse, other_out, other_lse)
    else:
        torch.ops.meshwright.merge_outputs_(out, lse, other_out, other_lse)
    return out, lse


@torch.library.impl("meshwright::merge_outputs_", "CompositeExplicitAutograd")
def _merge_outputs_(
    out: torch.Tensor, lse: torch.Tensor, other_out: torch.Tensor, other_lse: torch.Tensor
) -> None:
    if has_triton(out.device):
        from meshwright.parallel.context.output_merge.triton_merge import merge_in_one_kernel

        merge_in_one_kernel(out, lse, other_out, other_lse)
    else:
        _merge_eagerly(out, lse, other_out, other_lse)


@torch.library.register_fake("meshwright::merge_outputs_")
def _fake_merge_outputs_(
    out: torch.Tensor, lse: torch.Tensor, other_out: torch.Tensor, other_lse: torch.Tensor
) -> None:
    del out, lse, other_out, other_lse


def _merge_eagerly(
    out: torch.Tensor, lse: torch.Tensor, other_out: torch.Tensor, other_lse: torch.Tensor
) -> None:
    # of nothing and nothing: nothing
    weight = torch.sub(other_lse, lse).sigmoid_().nan_to_num_(0.0).to(out.dtype)
    torch.lerp(out, other_out.to(out.dtype), weight.unsqueeze(-1), out=out)
    torch.logaddexp(lse, other_lse, out=lse)
