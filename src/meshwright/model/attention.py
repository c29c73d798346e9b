"""What torch's attention is called with; a mask that is a bias less what another mask forbids remembers both."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Attention:
    """The arguments of F.scaled_dot_product_attention, by its names: `Attention(*args, **kwargs)`."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    attn_mask: torch.Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    @property
    def factor(self) -> float:
        """What scores are multiplied by."""
        return self.query.shape[-1] ** -0.5 if self.scale is None else self.scale

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensors among them."""
        given = (self.query, self.key, self.value, self.attn_mask)
        return tuple(each for each in given if each is not None)


PARTS = "superposed_of"  # the attribute of a mask that was made of two


def superposed(bias: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """A bias, less what a mask forbids; `parts` tells both."""
    if mask is None:
        return bias
    made = torch.where(mask, bias, torch.finfo(bias.dtype).min) if mask.dtype == torch.bool else bias + mask
    vars(made)[PARTS] = bias, mask
    return made


def parts(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The bias, and the mask, of which `superposed` has made this one; None of any other."""
    return vars(mask).get(PARTS)
