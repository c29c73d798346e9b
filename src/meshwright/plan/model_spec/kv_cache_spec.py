"""Describes what each layer of a model keeps of a sequence while tokens are generated."""

from dataclasses import dataclass


@dataclass(frozen=True)
class CachedLayer:
    """What one layer, in the block `block`, caches of each sequence, in elements.

    `per_token_numel` are keys and values of a token, of all `num_heads` heads; `shared_per_token_numel` what
    it caches of a token that has no heads. Of a sliding window of `window` tokens (0: none) the latest are
    kept. `states` do not grow with the sequence (recurrent layers): elements and dtype of each. `dtype` is
    that of the others; "" means the compute dtype of the job.
    """

    block: str
    num_heads: int = 1
    per_token_numel: int = 0
    shared_per_token_numel: int = 0
    window: int = 0
    dtype: str = ""
    states: tuple[tuple[int, str], ...] = ()
