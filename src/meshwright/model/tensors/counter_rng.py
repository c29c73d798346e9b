"""Counter-based random numbers: the number at a logical index is a hash of (key, index), and nothing else.

A stateful generator gives its n-th number to the n-th call, so its numbers depend on the order in which
devices draw. Here element i of a tensor is a function of a key (made of labels: seed, name, step...) and of
i, the index in the C-order of the *logical* tensor. Any slice can be made alone, in any order, on any rank,
with the same result.

    key    = blake2b(labels) -> 64 bits
    z      = key + (i + 1) * 0x9E3779B97F4A7C15                  splitmix64 in counter form, modulo 2^64
    z      = (z ^ z >> 30) * 0xBF58476D1CE4E5B9
    z      = (z ^ z >> 27) * 0x94D049BB133111EB
    bits   = z ^ z >> 31
    u      = (bits >> 11) / 2^53                                 in [0, 1)
    normal = sqrt(2) * erfinv((2 k + 1) / 2^53 - 1)           k = bits >> 11: never 0 or 1, so |normal| < 8.3

Integers wrap in int64 as they do in uint64, so the bits are the same on every device. Floating values are
computed in float64 and rounded once to the requested dtype.

Cost: about ten integer operations per number; temporary memory of a few chunks of 8 bytes per number
(`chunk_numel`), for a tensor of any size.

Limits: erfinv is implemented by the device, so a normal number may differ in its last float64 bit between a
CPU and a GPU.

Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
"""

from collections.abc import Callable
from hashlib import blake2b
from math import erf, nextafter, sqrt

import torch

# elements at once on a CPU: 0.5 MB of int64 stays in cache; 1 M elements at once took 1.7 times as long
CHUNK_NUMEL = 1 << 16
# elsewhere: 32 MB of int64 take longer to read and write than to launch
DEVICE_CHUNK_NUMEL = 1 << 22
GOLDEN_GAMMA = 0x9E3779B97F4A7C15
TWO_POW_63 = 1 << 63


def derive_key(seed: int, *labels: int | str) -> int:
    """Returns a 64-bit key; different labels, or the same labels divided differently, give unrelated keys."""
    digest = blake2b(digest_size=8)
    for label in (seed, *labels):
        text = f"{type(label).__name__}:{label}".encode()
        digest.update(len(text).to_bytes(4, "little") + text)
    return int.from_bytes(digest.digest(), "little")


def signed64(word: int) -> int:
    """Returns the signed integer with the bits of the 64-bit `word`."""
    return (word + TWO_POW_63) % (2 * TWO_POW_63) - TWO_POW_63


def chunk_numel(device: torch.device) -> int:
    """Returns how many numbers are made at once on `device`."""
    return CHUNK_NUMEL if device.type == "cpu" else DEVICE_CHUNK_NUMEL


def random_bits(key: int | torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Returns 64 random bits (int64) for every element of `index` (int64); `key` may be an int64 tensor."""
    gamma = signed64(GOLDEN_GAMMA)
    if isinstance(key, int):
        z = (index * gamma).add_(signed64(key + GOLDEN_GAMMA))
    else:
        z = torch.add(key + gamma, index, alpha=gamma)
    z = _shifted_xor(z, 30).mul_(signed64(0xBF58476D1CE4E5B9))
    z = _shifted_xor(z, 27).mul_(signed64(0x94D049BB133111EB))
    return _shifted_xor(z, 31)


def top53(bits: torch.Tensor) -> torch.Tensor:
    """Returns the upper 53 bits, as integers in [0, 2^53)."""
    return (bits >> 11).bitwise_and_((1 << 53) - 1)


def uniform(
    key: int, start: int, count: int, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """Returns `count` numbers in [0, 1): those at the logical indices start, start + 1, ..."""
    out = torch.empty(count, dtype=dtype, device=device)
    fill_uniform_(out, key, start=start)
    return out


def normal(
    key: int, start: int, count: int, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """Returns `count` standard normal numbers: those at the logical indices start, start + 1, ..."""
    out = torch.empty(count, dtype=dtype, device=device)
    fill_normal_(out, key, start=start)
    return out


def fill_uniform_(
    tensor: torch.Tensor, key: int, low: float = 0.0, high: float = 1.0, *, start: int = 0
) -> None:
    """Fills `tensor` with numbers in [low, high), by logical index.

    `start` is the logical index of the first element. To make rows r, r + 1, ... of a larger tensor alone,
    pass start = r * (elements of one row). `tensor` may be strided; its elements are counted in the C-order
    of its shape.
    """
    below = _largest_below(high, low, tensor.dtype)

    def values(first: int, count: int) -> torch.Tensor:
        u = _random_top53(key, first, count, tensor.device).double().mul_(2.0**-53)
        return u.mul_(high - low).add_(low).clamp_(max=below)

    _fill(tensor, start, values)


def fill_normal_(
    tensor: torch.Tensor, key: int, mean: float = 0.0, std: float = 1.0, *, start: int = 0
) -> None:
    """Fills `tensor` with normal numbers, by logical index; `start` as in `fill_uniform_`."""

    def values(first: int, count: int) -> torch.Tensor:
        # in integers, because 2 k + 1 has 54 bits and only the centred number fits a float64 exactly
        odd = _random_top53(key, first, count, tensor.device).mul_(2).add_(1 - (1 << 53))
        return odd.double().mul_(2.0**-53).erfinv_().mul_(std * sqrt(2)).add_(mean)

    _fill(tensor, start, values)


def fill_truncated_normal_(
    tensor: torch.Tensor,
    key: int,
    mean: float = 0.0,
    std: float = 1.0,
    low: float = -2.0,
    high: float = 2.0,
    *,
    start: int = 0,
) -> None:
    """Fills `tensor` with normal numbers truncated to [low, high], by logical index.

    The bounds are absolute, not in units of std. The inverse of the distribution function maps one uniform
    number to one value, so nothing is rejected and the logical index is enough. Bounds further than 8 std
    from the mean do not truncate.
    """
    from_p, to_p = (_normal_cdf((bound - mean) / std) for bound in (low, high))

    def values(first: int, count: int) -> torch.Tensor:
        u = _random_top53(key, first, count, tensor.device).double().add_(0.5).mul_(2.0**-53)
        x = u.mul_(2 * (to_p - from_p)).add_(2 * from_p - 1)
        return x.erfinv_().clamp_(-6, 6).mul_(std * sqrt(2)).add_(mean).clamp_(low, high)

    _fill(tensor, start, values)


def _fill(tensor: torch.Tensor, start: int, values: Callable[[int, int], torch.Tensor]) -> None:
    step = chunk_numel(tensor.device)
    with torch.no_grad():
        if tensor.is_contiguous():
            flat = tensor.view(-1)
            for first in range(0, flat.numel(), step):
                part = flat[first : first + step]
                part.copy_(values(start + first, part.numel()))
        elif tensor.numel() <= step:
            tensor.copy_(values(start, tensor.numel()).view(tensor.shape))
        else:
            for i, row in enumerate(tensor.unbind(0)):
                _fill(row, start + i * row.numel(), values)


def _random_top53(key: int, first: int, count: int, device: torch.device) -> torch.Tensor:
    return top53(random_bits(key, torch.arange(first, first + count, dtype=torch.int64, device=device)))


def _shifted_xor(z: torch.Tensor, shift: int) -> torch.Tensor:
    # int64 shifts copy the sign; masking the upper bits makes the shift that of an unsigned number
    return (z >> shift).bitwise_and_((1 << (64 - shift)) - 1).bitwise_xor_(z)


def _normal_cdf(x: float) -> float:
    return (1 + erf(x / sqrt(2))) / 2


def _largest_below(high: float, low: float, dtype: torch.dtype) -> float:
    # a float64 just under `high` would round up to it in a narrower dtype
    if low >= high:
        return high
    if dtype == torch.float64:
        return nextafter(high, low)
    return torch.nextafter(torch.tensor(high, dtype=dtype), torch.tensor(low, dtype=dtype)).double().item()
