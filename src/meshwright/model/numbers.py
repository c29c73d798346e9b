"""Numbers of heads and widths that modules hold, and that must be those of the slice where a rank has one.

Code that says `x.view(rows, tokens, self.num_heads, width)` or `split(self.split_size)` would not run on a slice. What such
numbers are called is known by habit (the tables below), what they count by their values; which of them a forward reads, and for
which it must see the whole, only a run on slices shows (model/trying.py). It is tried with more of them until it runs:

    0    numbers of heads, keys and values, and what is named after a split
    1    also those of the config that an attention module holds (it gets a copy of its own)
    2    also widths that elsewhere mean the stream's
    3    all

Limits: a forward that reads such a number under another name does not run on slices, and its layers stay whole.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from meshwright.core.calls import Number
from meshwright.core.cut import Cut
from meshwright.model.pairing import Group

HEADS = ("num_heads", "n_heads", "n_head", "num_attention_heads", "num_query_heads", "nhead", "heads")
KEYS = ("num_kv_heads", "num_key_value_heads", "n_kv_heads", "n_head_kv")
SHARED_BY = ("num_key_value_groups", "num_queries_per_kv", "n_rep")
WIDTHS = ("split_size", "all_head_size", "inner_dim")
STREAM_WIDTHS = ("embed_dim", "hidden_size", "d_model")
ATTEMPTS = 4


def numbers_of(module: nn.Module, group: Group, attempt: int) -> Iterator[Number]:
    """The numbers that modules around the layers of `group` hold of its heads and its width."""
    cut = group.cut
    width = sum(cut.sections)
    if width == cut.units:  # single features: there is nothing to count
        return
    names = (*WIDTHS, *STREAM_WIDTHS) if attempt >= 2 else WIDTHS
    for name in _holders(group):
        holder = module.get_submodule(name)
        yield from _among(name, "", vars(holder), cut, names)
        config = vars(holder).get("config")
        if attempt % 2 and config is not None:
            yield from _among(name, "config.", vars(config), cut, ())


def _among(module: str, prefix: str, held: Mapping[str, Any], cut: Cut, widths: tuple[str, ...]) -> Iterator[Number]:
    values = {name: value for name, value in held.items() if isinstance(value, int) and not isinstance(value, bool)}
    heads = cut.heads or cut.units
    asking = next((values[name] for name in HEADS if name in values and values[name] % heads == 0), heads)
    for name, value in values.items():
        if (name in HEADS and value == asking) or (name in widths and value == sum(cut.sections)):
            yield Number(module, prefix + name, _counted(cut, value, value // cut.units))
        elif name in KEYS and value % cut.units == 0:
            own = value // cut.units if cut.heads and value == cut.heads else 0
            yield Number(module, prefix + name, _counted(cut, value, own))
        elif name in SHARED_BY and cut.heads and value == cut.heads // cut.units:
            asked, answering = _counted(cut, cut.heads, value), _counted(cut, cut.units, 0)
            yield Number(module, prefix + name, asked, answering)


def _counted(cut: Cut, value: int, own: int) -> Cut:
    """How `value` things are dealt out as `cut` is, of which so many in a unit are its heads' own."""
    return Cut(0, cut.units, (value,), cut.side, cut.heads, (own,) if cut.heads else ())


def _holders(group: Group) -> Iterator[str]:
    """The modules that hold layers of `group`, from the innermost that holds all those of one visit down to the layers."""
    visits: dict[str, list[str]] = {}
    for node in (*group.sources, *group.rows):
        if node.kind != "argument":
            visits.setdefault(node.visit, []).append(node.name)
    for names in visits.values():
        paths = [name.split(".")[:-1] for name in names]
        depth = next((i for i, parts in enumerate(zip(*paths, strict=False)) if len(set(parts)) > 1), min(map(len, paths)))
        yield from dict.fromkeys(".".join(path[:length]) for path in paths for length in range(depth, len(path) + 1))
