"""Computes the bytes that a rank needs to generate: of keys, values and states that it caches, and of weights
that it gathers.

    bytes = sum over the layers of this rank's stages of
              sequences x min(tokens, window) x heads of this rank x (key and value features) x element size
            + sequences x state

    full attention      grows with the tokens           [ a a a a a a ]
    sliding window      up to the window                      [ a a a ]
    recurrent           a state of fixed size                      [ s ]

Along tp a rank has the heads of keys that its query heads use; what is cached without a head for each rank
(one latent vector) lies on all. Along pp a rank has its own layers, along data axes its own sequences. With
decode_context_parallel ranks along cp divide the tokens of layers that have no window: the rank with most has
tokens / cp, rounded up. All running sequences have as many columns as the longest, so `num_tokens` is that of
the longest, without its newest token. While a layer takes in a token, its old tensors live beside the new
ones; they count as memory of a forward.

Sharded weights that are gathered once for all tokens lie beside their shards: those of the stages and slices
of a rank, with the padding of their groups.
"""

from collections.abc import Iterable

from meshwright.plan.model_spec.kv_cache_spec import CachedLayer
from meshwright.plan.model_spec.model_spec import FLOAT_NBYTES, block_of
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import in_mesh_order
from meshwright.plan.sharding.rank_view import RankView

COLWISE_ROLES = ("colwise", "packed_colwise")


def kv_cache_nbytes(
    cached_layers: Iterable[CachedLayer],
    plan: Plan,
    rank: int,
    num_seqs: int,
    num_tokens: int,
    *,
    decode_context_parallel: bool = False,
) -> int:
    """Returns the bytes that `rank` of `plan` caches of `num_seqs` sequences of `num_tokens` tokens each.

    With `decode_context_parallel`, those of the rank along the axes of tokens that has most.
    """
    view, precision = plan.rank_view(rank), plan.job.precision
    blocks = {block_of(call) for call in view.model_spec.block_calls}

    def itemsize(dtype: str) -> int:
        return FLOAT_NBYTES["float64" if precision.compute == "float64" else dtype or precision.compute]

    axes = plan.sharding.token_axes if decode_context_parallel else ()
    num_own, nbytes = -(-num_tokens // plan.mesh.group_size(axes)), 0
    for layer in cached_layers:
        if layer.block in blocks:
            kept = min(num_tokens, layer.window) if layer.window else num_own
            of_heads = _num_local_heads(layer, view) * (layer.per_token_numel // layer.num_heads)
            nbytes += kept * (of_heads + layer.shared_per_token_numel) * itemsize(layer.dtype)
            nbytes += sum(numel * itemsize(dtype) for numel, dtype in layer.states)
    return num_seqs * nbytes


def gathered_weights_nbytes(plan: Plan, rank: int) -> int:
    """Returns the bytes of weights that `rank` of `plan` gathers, and keeps until the last token."""
    view, dtype = plan.rank_view(rank), plan.job.precision.parameters
    first = {group.name: group.param_shardings[0] for group in view.all_param_groups}
    return sum(
        flat_param.numel * first[name].param.itemsize(dtype)
        for name, flat_param in view.flat_param_specs.items()
        if first[name].is_stored_sharded
    )


def _num_local_heads(layer: CachedLayer, view: RankView) -> int:
    """Returns the number of heads of keys that this rank computes: those of its slice of the layer that
    projects to them, whose smallest units are such heads.
    """
    found = [
        (split, [axis for axis, dim in each.sliced_dims.items() if dim == split.dim])
        for each in view.unsliced_param_shardings
        if each.param.role in COLWISE_ROLES
        and layer.block in map(block_of, each.param.block_calls)
        and (split := each.param.split_of_side("out")) is not None
        and split.num_units == layer.num_heads
    ]
    axes = in_mesh_order({axis for _, axes in found for axis in axes})
    if not axes:
        return layer.num_heads
    smallest = min((split for split, _ in found), key=lambda split: sum(split.sections))
    keys = smallest.section_splits[-1]  # queries may be more, and stand before
    mesh = view.plan.mesh
    local = keys.size(mesh.index(view.coordinate, axes), mesh.group_size(axes))
    return local * keys.num_units // keys.sections[0]
