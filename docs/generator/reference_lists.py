"""Makes the pages that list what the package knows: devices, and options that `import-config` reads."""

from collections.abc import Iterable, Iterator

from docs.generator.essay import NOTE, cell
from meshwright.commands.config_help.device_list import FIGURES, device_rows
from meshwright.commands.import_config.import_config import FORMATS
from meshwright.commands.import_config.option_rules import OFF, Rule
from meshwright.plan.hardware.device_specs import known_devices

HARDWARE_PAGE, IMPORT_PAGE = "docs/reference/hardware.md", "docs/reference/imports.md"
HARDWARE_TEXT = """The devices that `--hardware` knows, with the figures of their makers: TFLOP/s of matrix
products without sparsity (of float16 where bfloat16 is missing), links to the devices of the same host and
network per device, one way. A dash is a figure that is not known, or that depends on the computer: up to 8
such devices are assumed to share one host. A device that is not here is described in
[a file](../howto/choose_a_plan.md#your-own-hardware)."""
IMPORT_TEXT = """`meshwright import-config FILE` makes a config from one of another tool. Each option of a
file is *mapped* to keys, *dropped* because it changes no result here, or *refused* because nothing here does
the same; then the message says what to do. An option that is in no table is listed as unknown. Where the
other tool's default differs from the one here, the default is written too. See
[migration](../migration.md)."""
TOOLS = {
    "accelerate": ("Accelerate", "`accelerate config` (accelerate 1.15)"),
    "deepspeed": ("DeepSpeed", "the JSON config (DeepSpeed 0.19)"),
    "megatron": ("Megatron-LM", "the arguments of `pretrain_gpt.py` (2025), without their dashes"),
    "torchtitan": ("torchtitan", "the TOML job config (2024 and 2025)"),
}


def reference_lists() -> dict[str, str]:
    """Returns the pages by their paths."""
    return {HARDWARE_PAGE: _page(_hardware()), IMPORT_PAGE: _page(_imports())}


def _page(lines: Iterable[str]) -> str:
    return "\n".join(lines).rstrip("\n") + "\n"


def _hardware() -> Iterator[str]:
    yield from ("# Known devices", "", NOTE.format(origin="src/meshwright/plan/hardware/devices.csv"), "")
    yield from (HARDWARE_TEXT, "", f"| device | {' | '.join(FIGURES)} | source |")
    yield f"| --- |{' --- |' * (len(FIGURES) + 1)}"
    sources = {device.name: device.source for device in known_devices()}
    for name, *figures in device_rows():
        yield f"| {' | '.join([name, *figures, cell(sources[name])])} |"


def _imports() -> Iterator[str]:
    origin = "src/meshwright/commands/import_config"
    yield from ("# Imported options", "", NOTE.format(origin=origin), "", IMPORT_TEXT, "")
    for name, (title, source) in TOOLS.items():
        rules = FORMATS[name]
        yield from (f"## {title}", "", f"From {source}.", "")
        yield from ("| option | becomes |", "| --- | --- |")
        mapped = {option: rule for option, rule in rules.items() if rule.verdict == "mapped"}
        yield from (f"| `{option}` | {_target(rule)} |" for option, rule in sorted(mapped.items()))
        for verdict, head in (("refused", "refused, and what to do"), ("dropped", "dropped because")):
            yield from ("", f"| option | {head} |", "| --- | --- |")
            yield from (
                f"| {_options(options)} | {_why(rule)} |"
                for rule, options in _by_rule(rules.items(), verdict)
            )
        yield ""


def _target(rule: Rule) -> str:
    keys = ", ".join(f"`{key}`" for key in rule.keys)
    return "; ".join(part for part in (keys, cell(rule.reason)) if part)


def _by_rule(rules: Iterable[tuple[str, Rule]], verdict: str) -> list[tuple[Rule, list[str]]]:
    """The options that share a reason, together."""
    found: dict[tuple[str, str], tuple[Rule, list[str]]] = {}
    for option, rule in rules:
        if rule.verdict == verdict:
            found.setdefault((rule.reason, rule.fix), (rule, []))[1].append(option)
    return list(found.values())


def _options(options: Iterable[str]) -> str:
    return ", ".join(f"`{option}`" for option in sorted(options))


def _why(rule: Rule) -> str:
    if rule.verdict == "dropped":
        return cell(rule.reason)
    harmless = [str(value) for value in rule.harmless if value not in OFF]
    unless = f" (but for {', '.join(harmless)})" if harmless else ""
    return cell(f"{rule.reason}{unless}: {rule.fix}")
