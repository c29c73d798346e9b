"""What divided matrices cannot do with a model and a mesh, said alike by all of this family, all of it at once.

    no pair             what was looked at, why it stays whole, and the two lines that declare roles
    a declared role     that cannot be had: no partner, other widths, a convolution
    divided twice       two strategies for the same matrices
    too many ranks      fewer units than ranks: the sizes of the axis that work, and what the other ranks could do instead

All of it comes together, before any process starts.
"""

from collections.abc import Iterable, Iterator

from meshwright.model.tensor_parallel.layer_roles import NUMBERED
from meshwright.model.trial.divisible_layers import declaration
from meshwright.parallel.tensor.layer_sharding import Ways, way_of
from meshwright.plan.job.errors import Fault
from meshwright.plan.model_spec.model_spec import Anatomy, Weight
from meshwright.plan.sharding.sharding_plan import Space

SHOWN = 4  # reasons in a message
KEPT = ("", "replicated")
DIVIDED = ("columns", "rows", "gathered")


def axis_fault(axis: str, divided: str, where: str) -> Fault:
    """What is `divided` is so along tp, and not along `axis`."""
    return Fault(f"axis = '{axis}'; {divided} are divided along tp", 'write axis = "tp"', f"{where}.axis")


def twice_faults(space: Space, axis: str, where: str) -> Iterator[Fault]:
    """Matrices that another strategy divides along `axis` already."""
    divided = [home.weight.name for home in space.homes if axis in home.cut and home.weight.role in DIVIDED]
    if divided:
        text = f"another strategy divides {len(divided)} weights of pairs along {axis} already ({divided[0]}...)"
        yield Fault(text, "keep one of those that divide matrices: line, grid, grid25 or cube", where)


def unknown_faults(anatomy: Anatomy, where: str) -> Iterator[Fault]:
    """A model without a pair, and roles that the user declared and that cannot be had."""
    wishes = [weight for weight in anatomy.weights if weight.declared not in KEPT and not weight.role and len(weight.shape) > 1]
    for (pattern, why), weights in _alike(wishes).items():
        text = f"{pattern} is declared as {weights[0].declared}, and that cannot be: {why}"
        yield Fault(text, "correct the roles of sockets=..., or leave it out: it then stays whole on every rank", "model.sockets")
    if any(call.role in ("rows", "gathered") for call in anatomy.calls) or wishes:
        return
    matrices = [weight for weight in anatomy.weights if len(weight.shape) > 1 and not weight.role]
    found = _alike(matrices)
    shown = [f"{pattern}: {why}" for pattern, why in list(found)[:SHOWN]]
    more = f"; and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    text = f"no pair of linear layers of {anatomy.name} is known to split ({'; '.join(shown)}{more})"
    layers = list(dict.fromkeys(NUMBERED.sub("*", weight.name).rpartition(".")[0] for weight in matrices if weight.hidden))
    fix = f"declare them: {declaration(layers or ['layers.*.up', 'layers.*.down'])}"
    yield Fault(text, f"{fix}\n  see it all with `meshwright plan CONFIG.toml --explain-model`", where)


def unit_faults(space: Space, ways: Ways) -> Iterator[Fault]:
    """Weights with fewer units than ranks along an axis, one fault per number of units."""
    found: dict[tuple[str, int], list[Weight]] = {}
    for weight in (home.weight for home in space.homes):
        way = way_of(ways, weight.layers[0], weight.role)
        for axis in way.cut if way else ():
            cut = weight.side(way.side(axis, weight)) if way else None
            if cut is not None and cut.most < space.mesh.size(axis):
                found.setdefault((axis, cut.most), []).append(weight)
    for (axis, units), weights in sorted(found.items()):
        ranks, each = space.mesh.size(axis), _each(weights[0], units)
        more = f" and {len(weights) - 1} more" if len(weights) > 1 else ""
        text = f"{weights[0].name}{more} {'divide' if more else 'divides'} into {units} units{each}, and {axis} has {ranks} ranks"
        yield Fault(text, f"set mesh.{axis} to at most {units}{_as_many(axis, units, ranks)}", f"mesh.{axis}")


def lone_faults(space: Space, axis: str) -> Iterator[Fault]:
    """Layers whose output is gathered, and that give out a number of features that does not divide by the ranks of `axis`."""
    ranks = space.mesh.size(axis)
    for weight in (home.weight for home in space.homes if home.weight.role == "gathered" and len(home.weight.shape) > 1):
        cut = weight.side("out")
        if cut is not None and cut.units % ranks:
            sizes = [size for size in range(2, cut.units + 1) if cut.units % size == 0 and size <= 2 * ranks]
            text = f"{weight.name} gives out {cut.units} features, which are gathered from {ranks} ranks in equal parts"
            near = f"set mesh.{axis} to {' or '.join(map(str, sizes))}, or " if sizes else ""
            yield Fault(text, f"{near}leave the layer out of sockets=..., or declare a rows layer behind it", "model.sockets")


def _each(weight: Weight, units: int) -> str:
    cut = next(cut for cut in weight.cuts if cut.most == units)
    width = sum(cut.sections) // len(cut.sections) // units
    return "" if width == 1 else f" of {width} features (heads that share a key stay together)"


def _as_many(axis: str, units: int, ranks: int) -> str:
    """What the same number of ranks could do with fewer along `axis`."""
    fewer = next((size for size in range(min(units, ranks), 1, -1) if ranks % size == 0), 1)
    if fewer == 1:
        return f"; or mesh.{axis} = 1 and mesh.dp_shard = {ranks}, as many ranks"
    return f"; mesh.{axis} = {fewer} and mesh.dp_shard = {ranks // fewer} are as many ranks"


def _alike(weights: Iterable[Weight]) -> dict[tuple[str, str], list[Weight]]:
    """`weights` by the pattern of their layer and why they stay whole."""
    found: dict[tuple[str, str], list[Weight]] = {}
    for weight in weights:
        layer = NUMBERED.sub("*", weight.name).rpartition(".")[0]
        found.setdefault((layer, weight.why or "used between layers"), []).append(weight)
    return found
