"""A model whose classes come from its own hub repository: the one place where code from elsewhere is imported.

Reached only with `model.trust_remote_code` and a commit, so that what runs is what was looked at. transformers imports the
files that `auto_map` in the config names from the snapshot of that commit; from there on the model is one like any other.
"""

import copy
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import transformers
from torch import nn

from meshwright.core.errors import PlanError

WHERE = "model.source"


def repository_factory(
    folder: Path, raw: Mapping[str, Any], auto_map: Mapping[str, Any], overrides: Mapping[str, Any]
) -> Callable[[], nn.Module]:
    """The function that constructs the model of the config `raw` from the classes in `folder` that `auto_map` names.

    Raises PlanError when the code cannot be imported, lacks the architecture, or refuses the config.
    """
    named = {str(reference).rpartition(".")[2]: str(reference) for reference in auto_map.values() if isinstance(reference, str)}
    architecture = next(iter(raw.get("architectures") or ()), "")
    if architecture not in named:
        text = f"auto_map names {', '.join(named) or 'no class'}, and the architecture is '{architecture}'"
        raise PlanError(text, fix="name in architectures a class that auto_map has", where=WHERE)
    fetched = import_module("transformers.dynamic_module_utils").get_class_from_dynamic_module
    try:
        if "AutoConfig" in auto_map:
            config_class: Any = fetched(auto_map["AutoConfig"], str(folder))
        else:
            config_class = transformers.CONFIG_MAPPING[raw["model_type"]]
        model_class: Any = fetched(named[architecture], str(folder))
        config = config_class.from_dict({**raw, **overrides, "auto_map": dict(auto_map)})
    except Exception as error:  # the code is of others, and so are its errors
        text = f"the code of the repository in {folder} fails: {type(error).__name__}: {error}"
        raise PlanError(text, fix="install what it needs, or choose another commit: model.revision", where=WHERE) from error
    if "use_cache" in config.to_dict():
        config.use_cache = False
    return lambda: model_class(copy.deepcopy(config))
