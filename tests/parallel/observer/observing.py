"""Functions that observers call in tests."""

import time

import torch
from torch import nn

CONSTANT = {"flat": torch.zeros(2, dtype=torch.float64), "rows": torch.zeros(3, dtype=torch.int64)}


def weights(model: nn.Module, version: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """All weights, and as many numbers as chance says."""
    flat = torch.cat([each.reshape(-1) for _, each in sorted(model.named_parameters())])
    length = int(torch.randint(1, 40, (), generator=generator))
    return {"flat": flat, "rows": torch.randint(24, (length, 1), generator=generator)}


def logits(model: nn.Module, version: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """What the model returns of some tokens, in eval mode; the later observer takes longer to say less."""
    tokens = torch.randint(13, (2, 5), generator=generator)
    if int(tokens[0, 0]) % 2:
        time.sleep(0.05)
    return {"flat": model(tokens).double(), "rows": torch.empty(0, 3, dtype=torch.int64)}


def raises(model: nn.Module, version: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Ends a run in its second call."""
    if version > 1:
        raise ZeroDivisionError("no arm was ever drawn")
    return CONSTANT


def another_name(model: nn.Module, version: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {"flat": CONSTANT["flat"], "arm": CONSTANT["rows"]}


def another_dtype(model: nn.Module, version: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    return CONSTANT | {"rows": torch.zeros(3)}


def no_tensor(model: nn.Module, version: int, generator: torch.Generator) -> dict[str, object]:
    return CONSTANT | {"rows": 3}


def nothing(model: nn.Module, version: int, generator: torch.Generator) -> None:
    return None


def too_much(model: nn.Module, version: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    return CONSTANT | {"rows": torch.zeros(300, 300, dtype=torch.int64)}


def too_deep(model: nn.Module, version: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    return CONSTANT | {"rows": torch.zeros([1] * 9, dtype=torch.int64)}


arm = 3  # no function
