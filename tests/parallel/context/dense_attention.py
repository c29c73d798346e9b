"""Attention computed by its formula, and named masks: the reference for kernels and rings."""

import torch

HEADS, GROUPS, WIDTH, VALUES, NUM_SAMPLES = 4, 2, 5, 3, 2
MASKS = ("none", "causal", "window", "documents", "padding", "bias", "learned")


def sample(
    queries: int,
    keys: int | None = None,
    *,
    heads: int = HEADS,
    groups: int = GROUPS,
    values: int = VALUES,
    samples: int = NUM_SAMPLES,
) -> list[torch.Tensor]:
    """Queries, keys, values and a gradient of the output, float64."""
    generator = torch.Generator().manual_seed(queries)
    keys = queries if keys is None else keys
    shapes = [
        (heads, queries, WIDTH),
        (groups, keys, WIDTH),
        (groups, keys, values),
        (heads, queries, values),
    ]
    return [torch.randn(samples, *shape, dtype=torch.float64, generator=generator) for shape in shapes]


def mask_of(name: str, length: int) -> torch.Tensor | None:
    """The mask of that name on so many tokens, as a model hands it to attention; "causal" is none that is
    handed.
    """
    at = torch.arange(length)
    behind = at.unsqueeze(-1) - at
    match name:
        case "window":
            return ((behind >= 0) & (behind < max(2, length // 3))).expand(1, 1, length, length)
        case "documents":  # three of unlike length, in each row others
            ends = torch.tensor([[length // 4, length // 2], [length // 3, length - 1]]).unsqueeze(1)
            document = (at.unsqueeze(-1) >= ends).sum(-1)
            return ((document.unsqueeze(-1) == document.unsqueeze(-2)) & (behind >= 0)).unsqueeze(1)
        case "padding":  # the first tokens of the second row are looked at by nobody, and look at nothing
            seen = torch.stack([at >= 0, at >= length // 2])
            return (seen[:, None, :, None] & seen[:, None, None, :]).expand(2, 1, length, length)
        case "bias" | "learned":
            return (
                -0.3
                * behind.abs().double()
                * torch.tensor([1.0, 0.5, 0.2, 0.1], dtype=torch.float64).view(1, 4, 1, 1)
            )
    return None


def dense(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    causal: bool,
    scale: float,
) -> torch.Tensor:
    """softmax(scale Q K^T + mask) V; rows that look at nothing are 0."""
    shared = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(shared, 1) for each in (key, value))
    scores = scale * query @ key.transpose(-1, -2)
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    blind = (scores == float("-inf")).all(-1, keepdim=True)
    return scores.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0) @ value


def with_gradients(
    given: list[torch.Tensor], mask: torch.Tensor | None, *, causal: bool, scale: float
) -> list[torch.Tensor | None]:
    """The output, and the gradients of query, key, value and a mask that asks for one."""
    *inputs, grad = given
    inputs = [each.clone().requires_grad_() for each in inputs]
    mask = None if mask is None else mask.detach().clone().requires_grad_(mask.requires_grad)
    out = dense(*inputs, mask, causal=causal, scale=scale)
    out.backward(grad)
    return [out.detach(), *(each.grad for each in inputs), None if mask is None else mask.grad]


def gap(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest difference, on the scale of the second."""
    return float((one - other).abs().max() / other.abs().max().clamp_min(1e-300)) if one.numel() else 0.0
