"""What share of their peaks devices and links reach: constants of a machine, fitted or measured, never of a plan.

    product     of the peak of matrix products, in the limit of large ones; in float8 with a scale per tensor, or per row; in
                float4; `casts`: how often what goes into such a product is read and written for it;
                `side`: the size of an inner dim at which half of that is reached
    tail        how much of a last wave of tiles that does not fill the device is paid for: 1 is all
    attention   of the peak, in fused attention; `attention_back`: in its backward, `attention_old`: old kernels
    memory      of the memory's rate, in what lies between products; `start_s` is what any kernel takes to start,
                `launch_s` what its host takes to ask for it: small kernels wait for that
    link, nic   of the rates of links inside a host and out of it; `latency_s` per hop
    crowd       hosts at which a fabric's rate has fallen to half, because they share its upper levels; `crowding`: how steeply
    *_hidden    of what tensor ranks, or copies, send: the share that runs beside products
    beside      how much a product is slowed by a gather beside it
    scores_*    how often attention that is not fused reads or writes its scores
    stream      how often what lies between a layer's products reads or writes the hidden state; `unfused`: times more where
                norms are several kernels; `inside`: how often what lies within attention and MLP is; `loss`: logits
    handover    how much of what goes to the next rank along pp is waited for, and `turn_s` beside it, whatever its size;
                `fixed_s`: once per step

Values are in rates.toml: by kind of device, with what they were fitted on.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib.resources import files


@dataclass(frozen=True)
class Rates:
    """The constants of a machine (see the module)."""

    product: float = 0.75
    product_float8: float = 0.6
    product_rowwise: float = 0.45
    product_float4: float = 0.5
    casts: float = 1.0
    side: float = 200.0
    tail: float = 0.75
    attention: float = 0.55
    attention_back: float = 0.8
    attention_old: float = 0.6
    memory: float = 0.7
    start_s: float = 4e-6
    launch_s: float = 1e-5
    link: float = 0.65
    nic: float = 0.65
    latency_s: float = 12e-6
    crowd: float = 40.0
    crowding: float = 2.0
    tensor_hidden: float = 0.5
    sums_hidden: float = 0.3
    beside: float = 0.2
    scores_eager: float = 11.0
    scores_fused: float = 7.0
    stream: float = 11.0
    unfused: float = 2.0
    inside: float = 1.5
    loss: float = 2.0
    handover: float = 1.0
    turn_s: float = 5e-4
    fixed_s: float = 0.02

    def scaled(self, by: Mapping[str, float]) -> "Rates":
        """These, each times what `by` says of it."""
        return replace(self, **{name: vars(self)[name] * factor for name, factor in by.items()})


NAMES = tuple(field.name for field in fields(Rates))


@cache
def rates_of(device: str) -> Rates:
    """Those of a kind of device, by its name in core/devices.csv; of one that nobody has fitted, those of all."""
    said = tomllib.loads((files("meshwright.planner") / "rates.toml").read_text(encoding="utf-8"))
    return Rates(**{**said["all"], **said.get(device, {})})
