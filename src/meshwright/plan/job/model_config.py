"""Defines where the model of a job and its initial weights come from."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class ModelConfig:
    """The model that is trained.

    `source` is a transformers config (a folder, a .json file, a hub id), or `file.py:factory` that returns an
    `nn.Module`. `weights` are the initial values: a folder with safetensors, one such file, or a hub id; ""
    draws them from the seed. With weights, source may be left out: it is then the same. Parameters that match
    a pattern of `skip` are not loaded and start from the seed. `revision` is the branch, tag or commit of a
    hub id; a plan holds the commit. Code from a hub repository runs only with `trust_remote_code`, and only
    that of a commit.

    `overrides` replaces fields of a transformers config, for example {num_hidden_layers = 2}. Parameters
    whose logical name matches a pattern of `frozen` (fnmatch), for example "model.embed_tokens.*", are not
    trained.
    """

    source: str = ""
    overrides: dict[str, int | float | bool | str | None] = field(default_factory=dict, hash=False)
    frozen: tuple[str, ...] = ()
    weights: str = ""
    revision: str = ""
    skip: tuple[str, ...] = ()
    trust_remote_code: bool = False
