"""Model shapes of any size, without values."""

from meshwright.plan.model_spec.model_spec import ModelSpec, ParamSpec

ParamShapes = list[tuple[str, tuple[int, ...]]]  # names and shapes of the parameters of a block


def even(name: str, parameters: int, blocks: int) -> ModelSpec:
    """Returns a model of `parameters` in `blocks` equal blocks; raises ValueError when they do not divide."""
    numel, rest = divmod(parameters, blocks)
    if rest:
        raise ValueError(f"{parameters} parameters do not divide into {blocks} blocks; choose a divisor")
    return _chain(name, {f"block{i}": [("weight", (numel,))] for i in range(blocks)})


def llama3_8b() -> ModelSpec:
    """Returns Llama 3 8B: 8,030,261,248 parameters in 35 blocks."""
    hidden, kv, intermediate, vocab_size = 4096, 1024, 14336, 128256
    layer: ParamShapes = [
        (name, (out, hidden)) for name, out in (("q", hidden), ("k", kv), ("v", kv), ("o", hidden))
    ]
    layer += [
        ("gate", (intermediate, hidden)),
        ("up", (intermediate, hidden)),
        ("down", (hidden, intermediate)),
    ]
    layer += [("norm1", (hidden,)), ("norm2", (hidden,))]
    blocks: dict[str, ParamShapes] = {"embed": [("weight", (vocab_size, hidden))]}
    blocks |= {f"layer{i}": layer for i in range(32)}
    blocks |= {"norm": [("weight", (hidden,))], "head": [("weight", (vocab_size, hidden))]}
    return _chain("Llama-3-8B", blocks)


def _chain(name: str, blocks: dict[str, ParamShapes]) -> ModelSpec:
    weights = tuple(
        ParamSpec(f"{block}.{param}", shape, (block,))
        for block, params in blocks.items()
        for param, shape in params
    )
    ones = (1,) * len(blocks)
    return ModelSpec(name, tuple(blocks), weights, ones, ones)
