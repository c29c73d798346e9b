"""Defines where the model of a job and its initial weights come from."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from re import fullmatch

from meshwright.plan.job.errors import Diagnostic


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

    def diagnostics(self) -> Iterator[Diagnostic]:
        """Yields every error in the model source by itself."""
        if not self.source:
            fix = (
                "set model.source to a transformers config (folder, .json file, hub id) or to file.py:factory"
            )
            yield Diagnostic("no model is named", fix, "model.source")
        if self.skip and not self.weights:
            text = f"skip = {list(self.skip)} without weights: every value is drawn from the seed"
            yield Diagnostic(text, "set model.weights, or remove model.skip", "model.skip")
        if self.trust_remote_code and not fullmatch("[0-9a-f]{40}", self.revision):
            revision = f"the revision '{self.revision}', which can change" if self.revision else "no revision"
            text = f"trust_remote_code with {revision}; needed is the commit whose code was looked at"
            yield Diagnostic(
                text, "set model.revision to its 40 hexadecimal digits", "model.trust_remote_code"
            )
