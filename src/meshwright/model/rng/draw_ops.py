"""Custom operators of the stateless draws: a whole mask, of all samples, in one call.

    keep_mask(samples, key, first, width, index, threshold)    bool     [len(samples), width]
    uniform(samples, key, first, width, index, dtype)          numbers in [0, 1), likewise

Element (s, i) is a function of `key`, of `samples[s]` and of the logical index first + i (or index[i]):

    bits   = splitmix64(splitmix64(key, samples[s]), first + i)        model/tensors/counter_rng.py
    keep   = bits / 2^64 >= threshold / 2^53                           numbers = upper digits of bits

On a GPU with Triton each call is one kernel (model/rng/triton_draws.py). Elsewhere it is integer arithmetic
of torch, in chunks, with the same bits. Operators have no gradient, and fake tensors see their shapes only.

Cost: on a CPU about ten operations per chunk of 65,536 elements, whose operands stay in cache; on a GPU
without Triton per chunk of 4 M elements.
"""

from collections.abc import Callable

import torch

from meshwright.device.local_device import has_triton
from meshwright.model.tensors.counter_rng import TWO_POW_63, chunk_numel, random_bits, signed64, top53

# more digits than the dtype has would round up to 1
DIGITS = {torch.float64: 53, torch.float32: 24}
OTHER_DIGITS = 8
SIGN_BIT = -(1 << 63)


# `torch.library.custom_op` would import torch's compiler at the first call, and takes 15 us more for each
ARGUMENTS = "Tensor samples, int key, int first, int width, Tensor? index"
torch.library.define("meshwright::keep_mask", f"({ARGUMENTS}, int threshold) -> Tensor")
torch.library.define("meshwright::uniform", f"({ARGUMENTS}, ScalarType dtype) -> Tensor")


@torch.library.impl("meshwright::keep_mask", "CompositeExplicitAutograd")
def _keep_mask(
    samples: torch.Tensor, key: int, first: int, width: int, index: torch.Tensor | None, threshold: int
) -> torch.Tensor:
    """Returns a bool mask [len(samples), width]: True where the upper 53 bits are at least `threshold`.

    `key` is 64 bits, as a signed integer; `samples` and `index` (see the module) are int64.
    """
    mask = samples.new_empty((len(samples), width), dtype=torch.bool)
    if threshold == 1 << 53:  # p = 1; one more than any of these numbers
        mask.fill_(False)
    elif has_triton(samples.device):
        from meshwright.model.rng.triton_draws import fill_keep_mask

        fill_keep_mask(mask, samples, key, first, index, threshold)
    else:
        # a comparison of unsigned numbers: with the other sign bit, signed ones have their order
        limit = signed64((threshold << 11) + TWO_POW_63)
        fill_eagerly(mask, samples, key, first, index, lambda bits: bits.bitwise_xor_(SIGN_BIT) >= limit)
    return mask


@torch.library.register_fake("meshwright::keep_mask")
def _fake_keep_mask(
    samples: torch.Tensor, key: int, first: int, width: int, index: torch.Tensor | None, threshold: int
) -> torch.Tensor:
    return samples.new_empty((len(samples), width), dtype=torch.bool)


@torch.library.impl("meshwright::uniform", "CompositeExplicitAutograd")
def _uniform(
    samples: torch.Tensor, key: int, first: int, width: int, index: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """Returns numbers of `dtype` in [0, 1), [len(samples), width]; arguments as of `keep_mask`."""
    numbers, digits = samples.new_empty((len(samples), width), dtype=dtype), DIGITS.get(dtype, OTHER_DIGITS)
    if has_triton(samples.device):
        from meshwright.model.rng.triton_draws import fill_uniform

        fill_uniform(numbers, samples, key, first, index, digits)
    else:
        fill_eagerly(
            numbers,
            samples,
            key,
            first,
            index,
            lambda bits: (top53(bits) >> (53 - digits)).double().mul_(2.0**-digits),
        )
    return numbers


@torch.library.register_fake("meshwright::uniform")
def _fake_uniform(
    samples: torch.Tensor, key: int, first: int, width: int, index: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    return samples.new_empty((len(samples), width), dtype=dtype)


keep_mask, uniform = torch.ops.meshwright.keep_mask.default, torch.ops.meshwright.uniform.default


def fill_eagerly(
    drawn: torch.Tensor,
    samples: torch.Tensor,
    key: int,
    first: int,
    index: torch.Tensor | None,
    convert: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """Fills `drawn` [len(samples), width] with `convert(bits)`, in chunks, by torch's integer arithmetic."""
    (num_samples, width), step = drawn.shape, chunk_numel(drawn.device)
    keys = random_bits(key, samples)
    chunk_samples = max(1, step // max(width, 1))
    for begin in range(0, width, step):
        end = min(begin + step, width)
        elements = (
            torch.arange(first + begin, first + end, dtype=torch.int64, device=drawn.device)
            if index is None
            else index[begin:end]
        )
        for sample in range(0, num_samples, chunk_samples):
            bits = random_bits(keys[sample : sample + chunk_samples, None], elements)
            drawn[sample : sample + chunk_samples, begin:end].copy_(convert(bits))
