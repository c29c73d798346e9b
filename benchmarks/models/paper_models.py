"""Models that exist on paper only, of any size: blocks and shapes, and no values."""

from meshwright.plan.model_spec.model_spec import ModelSpec, ParamSpec

Parts = list[tuple[str, tuple[int, ...]]]  # of a block: names and shapes


def even(name: str, parameters: int, blocks: int) -> ModelSpec:
    """A model of `parameters` in `blocks` equal blocks; raises ValueError when they do not divide."""
    numel, rest = divmod(parameters, blocks)
    if rest:
        raise ValueError(f"{parameters} parameters do not divide into {blocks} blocks; choose a divisor")
    return _chain(name, {f"block{i}": [("weight", (numel,))] for i in range(blocks)})


def llama3_8b() -> ModelSpec:
    """Llama 3 8B: 8,030,261,248 parameters in 35 blocks."""
    hidden, kv, wide, vocabulary = 4096, 1024, 14336, 128256
    layer: Parts = [
        (name, (out, hidden)) for name, out in (("q", hidden), ("k", kv), ("v", kv), ("o", hidden))
    ]
    layer += [("gate", (wide, hidden)), ("up", (wide, hidden)), ("down", (hidden, wide))]
    layer += [("norm1", (hidden,)), ("norm2", (hidden,))]
    blocks: dict[str, Parts] = {"embed": [("weight", (vocabulary, hidden))]}
    blocks |= {f"layer{i}": layer for i in range(32)}
    blocks |= {"norm": [("weight", (hidden,))], "head": [("weight", (vocabulary, hidden))]}
    return _chain("Llama-3-8B", blocks)


def _chain(name: str, blocks: dict[str, Parts]) -> ModelSpec:
    weights = tuple(
        ParamSpec(f"{visit}.{part}", shape, (visit,))
        for visit, parts in blocks.items()
        for part, shape in parts
    )
    ones = (1,) * len(blocks)
    return ModelSpec(name, tuple(blocks), weights, ones, ones)
