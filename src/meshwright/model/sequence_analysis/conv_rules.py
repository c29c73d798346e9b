"""Convolutions over tokens, and what models put around tokens for them: which of it a rank can do that has some of the tokens.

F.conv1d takes in neighbours of each token, and is answered where those are on other ranks (model/convolve.py). Models write:

    even         conv1d(x, padding=(k - 1) / 2)                    as many tokens come out as go in
    causal       conv1d(x, padding=k - 1)[..., :tokens]            what is behind the tokens is cut off
    causal       conv1d(F.pad(x, (k - 1, 0)))                      zeros, then tokens, go in

So there are tensors with something around the tokens: zeros, before a convolution, or what nobody will use, behind one. Such a
tensor may be computed with element by element, be turned round, and be cut to its tokens; whatever else is done with it is named.
"""

from dataclasses import dataclass, replace

import torch

from meshwright.model.sequence_analysis import token_rules
from meshwright.model.sequence_analysis.token_dims import factors, spread
from meshwright.model.sequence_analysis.token_rules import OWN, Along, Step
from meshwright.model.sequence_parallel.conv_call import Convolution
from meshwright.model.tensors.op_tables import ALIKE, ELEMENTWISE, reads
from meshwright.plan.model_spec.sequence_info import Convolve

PADS = "pads tokens"
KEEPS = "keeps some of the tokens (copy): build the model with use_cache=False, if that is a cache"
LONGER = "convolves tokens into more than there are, which are not cut at once: y[..., :tokens]"
_AS_IT_IS = frozenset(("contiguous", "clone", "detach", "to", "type", "type_as", "float", "double", "half", "bfloat16"))
_TURNS = frozenset(("transpose", "swapaxes", "swapdims", "permute", "mT"))
_ELEMENTWISE = ELEMENTWISE - ALIKE - {"dropout", "rand_like"}  # those draw by the place of an element among all


@dataclass(frozen=True)
class Around(Along):
    """Tokens along the dim that is number `back` from behind, with so many elements `before` and `after` them; zeros, if `empty`.

    `made` says why that cannot be computed with.
    """

    back: int = 1
    before: int = 0
    after: int = 0
    empty: bool = False


def followed(step: Step) -> str:
    """Note in `step.held` how what it has made has tokens, with whatever stands around them. Returns why nobody knows."""
    found = {each: known for each in step.given if isinstance(known := step.held.get(each), Around)}
    if not found:
        if step.name == "copy" and step.of("part"):
            return KEEPS
        return "" if step.name == "pad" and _pads(step) else token_rules.followed(step)
    if not step.made and step.name != "setitem" and not reads(step.name):
        return ""  # it asks for a shape
    tensor, known = next(iter(found.items()))
    if step.name == "getitem" and tensor is step.args[0]:
        return _cut(step, known)
    if step.name in _TURNS:
        return _keep(step, replace(known, back=_turned(step, tensor.ndim, known.back)))
    if step.name in _AS_IT_IS:
        return _keep(step, known)
    written = any(each is step.made[0] for each in step.given) if step.made else True
    beside = all(_beside(step, each, known) for each in step.given)
    if step.name in _ELEMENTWISE and beside and not (written and any(each.empty for each in found.values())):
        return _keep(step, replace(known, empty=False))
    return f"{known.made} ({step.name})"


def convolution(step: Step) -> tuple[str, Convolve]:
    """Why a call of F.conv1d cannot be answered; "": it can. With what is to be known of it, but for where it is.

    Its `tokens` are as many as there are in the trial.
    """
    given, nothing = Convolution(*step.args, **step.kwargs), Convolve("", "")
    known = step.held.get(given.input)
    alone = given.input.ndim == 3 and step.dims(given.input) == (0,)  # each token is a row of its own
    if known is None or known.kind not in ("own", "around") or (known.kind == "own" and alone):
        return token_rules.followed(step), nothing
    if any(each is not None and each in step.held for each in (given.weight, given.bias)):
        return "convolves tokens with a kernel that is made of them (conv1d)", nothing
    frame = known if isinstance(known, Around) else _bare(step, given.input)
    left = frame.before + given.padded[0]
    behind = left + frame.after + given.padded[1] - given.reach
    why = _unlike(step, given, known, frame)
    if not why and behind < 0:
        why = f"convolves tokens into fewer: {-behind} zeros are missing around them (conv1d)"
    if not why and left > given.reach:
        why = "convolves tokens of which more stand behind than its kernel reaches over (conv1d)"
    if why:
        return why, nothing
    for each in step.made:
        step.held[each] = Around("around", made=LONGER, after=behind) if behind else OWN
    said = {"before": frame.before, "after": frame.after, "behind": behind, "needed": given.input.requires_grad}
    tokens, width = given.input.shape[-1] - frame.before - frame.after, given.input.shape[-2]
    return "", replace(nothing, tokens=tokens, width=width, left=left, right=given.reach - left, **said)


def _bare(step: Step, tensor: torch.Tensor) -> Around:
    """Tokens with nothing around them."""
    return Around("around", back=tensor.ndim - step.dims(tensor)[0], empty=True)


def _unlike(step: Step, given: Convolution, known: Along, frame: Around) -> str:
    """Why a convolution is not over tokens, or is none that is known."""
    if frame.back == 2:
        return "sums over tokens (conv1d)"
    tokens = given.input.shape[-1] - frame.before - frame.after
    if frame.back != 1 or known.behind != 1 or tokens not in factors(step.length):
        return "computes 'conv1d' along tokens"
    if not frame.empty:
        return f"{frame.made} (conv1d)"
    return f"convolves tokens in steps of {given.step} (conv1d)" if given.step != 1 else ""


def _pads(step: Step) -> bool:
    """Whether zeros are put around tokens."""
    tensor = step.argument(0, "input")
    known = step.held.get(tensor)
    if known is None or known.kind != "own" or known.behind != 1:
        return False
    back = _bare(step, tensor).back
    pads = list(step.argument(1, "pad"))[2 * back - 2 : 2 * back]
    mode, value = step.argument(2, "mode", default="constant"), step.argument(3, "value")
    if not any(pads) or min(pads) < 0 or mode != "constant" or value or tensor.shape[-back] not in factors(step.length):
        return False
    for each in step.made:
        step.held[each] = Around("around", made=PADS, back=back, before=pads[0], after=pads[1], empty=True)
    return True


def _cut(step: Step, known: Around) -> str:
    """What stands around tokens is cut off, or left alone."""
    tensor, index = step.args[:2]
    parts = index if isinstance(index, tuple) else (index,)
    at, size = tensor.ndim - known.back, tensor.shape[-known.back]
    own = range(size)[known.before : size - known.after]
    if not all(each is None or each is Ellipsis or type(each) in (slice, int) for each in parts):
        return f"{known.made} ({step.name})"
    taken = [range(size)[each] for dim, each in spread(parts, tensor.ndim) if dim == at]
    if taken == [own]:
        step.held.update(dict.fromkeys(step.made, OWN))
        return ""
    if taken in ([], [range(size)]) and not any(each is None or type(each) is int for each in parts):
        return _keep(step, known)
    return f"{known.made} ({step.name})"


def _keep(step: Step, known: Around) -> str:
    """What is made has as much around its tokens."""
    size = next(each.shape[-was.back] for each in step.given if isinstance(was := step.held.get(each), Around))
    if any(each.ndim < known.back or each.shape[-known.back] != size for each in step.made):
        return f"{known.made} ({step.name})"
    step.held.update(dict.fromkeys(step.made, known))
    return ""


def _turned(step: Step, ndim: int, back: int) -> int:
    """Where tokens stand behind a change of dims, counted from behind."""
    at = ndim - back
    if step.name == "permute":
        said = step.argument(1, "dims")
        order = said if isinstance(said, (tuple, list)) else step.args[1:]
        return ndim - [each % ndim for each in order].index(at)
    dims = (-2, -1) if step.name == "mT" else [step.argument(place, f"dim{place - 1}", f"axis{place - 1}") for place in (1, 2)]
    one, two = (each % ndim for each in dims)
    return ndim - (two if at == one else one if at == two else at)


def _beside(step: Step, each: torch.Tensor, known: Around) -> bool:
    """Whether `each` has as much around its tokens, at the same place, or none at all."""
    mine = step.held.get(each)
    if isinstance(mine, Around):
        return (mine.back, mine.before, mine.after) == (known.back, known.before, known.after)
    return mine is None and not step.dims(each) and (each.ndim < known.back or each.shape[-known.back] == 1)
