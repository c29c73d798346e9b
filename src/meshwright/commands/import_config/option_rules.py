"""Rules for the options of another tool, and the record of what became of those that a file sets.

    Rule            what the importer does with an option: maps it, drops it, or refuses it
    ImportedOption  what became of one option of a file, with the value that was given
    Translation     the config that is made, and the record

An option without a rule is listed as unknown. Nothing is left out silently: an option of which a file says
nothing, but whose default differs from the one here, is written too and recorded as "(default)".
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from meshwright.plan.job.errors import suggest_name

Verdict = Literal["mapped", "dropped", "refused", "unknown"]
TODO_VERDICTS: tuple[Verdict, ...] = ("refused", "unknown")
OFF = (None, False, 0, "", "none", "None", "no", "NO", {}, [])  # values with which an option does nothing
# reasons that several formats give
LOGGING = "changes what is logged, not what is trained"
ACTIVATION_OFFLOAD = (
    "what leaves the device is not chosen by module or by number of layers",
    "nearest: activation_offload, for what whole blocks keep, of those that its `blocks` name",
)
OFFLOAD_KEYS = ("offload.what", "offload.step_on")  # what another tool's options of offload become
DISK_KEYS = ("disk_offload.folder", "disk_offload.num_buffers", "disk_offload.what")
HOST_STEPS = "the host steps; replicas of shards sum gradients on the device"
FLOAT8 = (
    "float8 products are the strategy fp8, whose options are not imported",
    'write precision.compute = "bfloat16", and [[strategies]] name = "fp8"',
)
OFF_TEXT = "this value turns nothing on"


@dataclass(frozen=True)
class Rule:
    """The fate of an option: `keys` are those that it becomes, `reason` says why it is dropped or refused, or
    what differs, and `fix` what to do instead.

    A refused option is dropped if its value is one of `harmless`.
    """

    verdict: Verdict
    keys: tuple[str, ...] = ()
    reason: str = ""
    fix: str = ""
    harmless: tuple[Any, ...] = OFF


Rules = Mapping[str, Rule]


def mapped(*keys: str, reason: str = "") -> Rule:
    """Returns the rule of an option that becomes `keys`; `reason` says what differs."""
    return Rule("mapped", keys, reason)


def dropped(reason: str, *options: str) -> dict[str, Rule]:
    """Returns the rules of `options` that change no result, or that nothing here needs."""
    return dict.fromkeys(options, Rule("dropped", reason=reason))


def refused(reason: str, fix: str, *options: str, harmless: tuple[Any, ...] = ()) -> dict[str, Rule]:
    """Returns the rules of `options` that change results or memory in a way that no key expresses.

    Values in `harmless`, beside those of OFF, do nothing.
    """
    return dict.fromkeys(options, Rule("refused", (), reason, fix, (*OFF, *harmless)))


@dataclass(frozen=True)
class ImportedOption:
    """What became of an option: `text` is the keys with their values, or the reason; `fix` what to do."""

    option: str
    value: str
    verdict: Verdict
    text: str
    fix: str = ""


@dataclass
class Translation:
    """A config in the making: the `options` of a file by their flat names, and what has become of them.

    `made_model` is the transformers config of a model that the options describe.
    """

    rules: Rules
    options: Mapping[str, Any]
    document: dict[str, Any] = field(default_factory=dict)
    made_model: dict[str, Any] = field(default_factory=dict)
    decided: dict[str, ImportedOption] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)

    def get(self, option: str, default: Any = None) -> Any:
        """Returns the value of `option`; `default` if it is not given or "auto"."""
        value = self.options.get(option)
        return default if value is None or value == "auto" else value

    def is_given(self, option: str) -> bool:
        """Returns whether the file sets `option` to a value."""
        return self.get(option) is not None

    def set(self, key: str, value: Any) -> None:
        """Sets a dotted key of the config."""
        table, _, name = key.rpartition(".")
        node = self.document
        for part in table.split(".") if table else ():
            node = node.setdefault(part, {})
        node[name] = value

    def map(self, option: str, key: str, default: Any = None) -> Any:
        """Sets `key` to the value of `option`, or to the tool's `default`, and returns it; None sets nothing.

        A default is recorded, because it may differ from the one here.
        """
        value = self.get(option, default)
        if value is not None:
            self.set(key, value)
            if not self.is_given(option):
                self.record_default(option, value, key)
        return value

    def record_default(self, option: str, value: Any, *keys: str) -> None:
        """Records that the tool's default `value` of an option that is not given was written to `keys`."""
        name = f"{option} (default)"
        if self.options.get(option) != "auto":
            self.decided[name] = ImportedOption(name, str(value), "mapped", self._text(keys, ""))

    def refuse(self, option: str, reason: str, fix: str) -> None:
        """Records that the value of `option` is refused, whatever its rule says."""
        value = str(self.options.get(option, "(default)"))
        self.decided[option] = ImportedOption(option, value, "refused", reason, fix)

    def drop(self, option: str, reason: str) -> None:
        """Records that the value of `option` is dropped, whatever its rule says."""
        if option in self.options:
            value = str(self.options[option])
            self.decided[option] = ImportedOption(option, value, "dropped", reason)

    def add_strategy(self, name: str, **fields: Any) -> None:
        """Appends a strategy to the config."""
        self.document.setdefault("strategies", []).append({"name": name, **fields})

    def outcome(self) -> list[ImportedOption]:
        """Returns what became of every option of the file, and of the defaults that were written."""
        found = [
            self.decided.get(option) or self._by_rule(option, value) for option, value in self.options.items()
        ]
        found += [each for option, each in self.decided.items() if option not in self.options]
        order = ("refused", "unknown", "dropped", "mapped")
        return sorted(found, key=lambda each: order.index(each.verdict))

    def _by_rule(self, option: str, value: Any) -> ImportedOption:
        rule, shown = self.rules.get(option), _short_text(value)
        if rule is None:
            near = suggest_name(option, self.rules)
            hint = f"; {near}" if near.startswith("did") else ""
            text = f"this importer does not know it{hint}"
            return ImportedOption(option, shown, "unknown", text, "look up whether it changes results")
        if rule.verdict == "refused" and _is_harmless(value, rule):
            return ImportedOption(option, shown, "dropped", OFF_TEXT)
        if rule.verdict == "mapped" and value == "auto":
            keys = " and ".join(rule.keys) or "the config"
            text = "transformers' Trainer replaces auto by its own arguments, which are not in this file"
            return ImportedOption(option, shown, "refused", text, f"set {keys}")
        text = self._text(rule.keys, rule.reason) if rule.verdict == "mapped" else rule.reason
        return ImportedOption(option, shown, rule.verdict, text, rule.fix)

    def _text(self, keys: Iterable[str], reason: str) -> str:
        document = {**self.document, "model": {**self.document.get("model", {}), **self.made_model}}
        found = [(key, value) for key in keys for value in _lookup(document, key.split("."))]
        texts = [_key_text(key, value) for key, value in found]
        return "; ".join([*texts, *([reason] if reason else [])]) or "nothing is written: it is so here"


def _key_text(key: str, value: Any) -> str:
    if isinstance(value, list) and value and isinstance(value[0], dict) and "name" in value[0]:
        return f"{key} {', '.join(each['name'] for each in value)}"
    return key if isinstance(value, dict) else f"{key} = {value!r}"


def _lookup(node: Any, path: list[str]) -> Iterator[Any]:
    """The value at a dotted key, in which a strategy is named by its name."""
    if not path:
        yield node
        return
    inner = node.get(path[0]) if isinstance(node, dict) else None
    if inner is None and isinstance(node, dict):
        named = [each for each in node.get("strategies", ()) if each["name"] == path[0]]
        inner = named[0] if named else None
    if inner is not None:
        yield from _lookup(inner, path[1:])


def _is_harmless(value: Any, rule: Rule) -> bool:
    """Whether the value turns nothing on; a table does not if neither enabled nor on a device."""
    if isinstance(value, Mapping) and ("enabled" in value or "device" in value):
        return value.get("enabled") in OFF and value.get("device") in OFF
    # True equals 1 in Python, but a flag is on and a size of 1 is not
    return any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in rule.harmless)


def _short_text(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else text[:37] + "..."


def flatten(values: Mapping[str, Any], rules: Rules, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields nested `values` by dotted names; a table for which there is a rule of its own stays whole."""
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and name not in rules:
            yield from flatten(value, rules, f"{name}.") if value else [(name, {})]
        else:
            yield name, value
