"""Makes the table of what has run on one GPU, from the results of `make gpu`."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from docs.generator.essay import cell

RESULTS = "benchmarks/results/gpu"
HEADING = "On one GPU"
INTRODUCTION = """`make gpu` runs these sections on one GPU, each once.
Seconds of `speed` are means over steps of a Llama of 550 million parameters, 4 x 2,048 tokens, one loop after
the other; in all but fp32 the GPU is idle for a part of the step, so they show the time of the host too. The
ratio of steps in turn has its spread and its A/A."""

Found = Mapping[str, Any]


def gpu_lines(root: Path) -> list[str]:
    """Returns the section of the page, empty without results."""
    records = [
        json.loads(path.read_text(encoding="utf-8")) for path in sorted((root / RESULTS).glob("*.json"))
    ]
    if not records:
        return []
    rows = [
        f"| {each['section']} | {each['status']} | {cell(_text(each))} | "
        f"{each['date'][:10]}, {each['commit'][:8]} |"
        for each in records
    ]
    device = next((each["found"]["device"] for each in records if "device" in each["found"]), "one GPU")
    lines = [f"## {HEADING}", "", f"{INTRODUCTION} Measured on an {device}.", ""]
    return [*lines, "| section | ended | found | measured |", "| --- | --- | --- | --- |", *rows, ""]


def _text(record: Found) -> str:
    try:
        text = TEXTS[record["section"]](record["found"])
    except KeyError:  # it ended before it had found that
        text = ""
    return f"{text}. {record['note']}" if "note" in record else text


def _environment(found: Found) -> str:
    return f"{found['libraries']}; tests that need a GPU: {found['tests'][-1]}"


def _parity(found: Found) -> str:
    fp32, half = (
        max(value for name, value in found["differences"].items() if word in name)
        for word in ("fp32", "autocast")
    )
    return (
        f"{len(found['differences'])} curves of loss and gradient norm beside one device: largest relative "
        f"difference {fp32:.1e} in fp32, {half:.1e} under autocast"
    )


def _drawn(found: Found) -> str:
    ran = found["outcomes"]
    compared = sum(ran.values()) - ran.get("refused", 0)
    return f"{ran.get('matched', 0)} of {compared} random plans equal the CPU to 1e-10, in float64"


def _races(found: Found) -> str:
    equal = sum(verdict == "equal" for verdict in found["plans"].values())
    planted = "seen" if found["planted race seen"] else "not seen"
    return f"late collectives leave the bits of {equal} of {len(found['plans'])}; a planted race is {planted}"


def _speed(found: Found) -> str:
    text = "; ".join(f"{name} {1e3 * row['s']:.0f} ms" for name, row in found["loops"].items())
    pair = found.get("in turn", {})
    if "ratio" not in pair:
        return text
    ratio, noise = ("{median:.3f} [{low:.3f}, {high:.3f}]".format(**pair[name]) for name in ("ratio", "aa"))
    return f"{text}; steps in turn, {pair['name']} / {pair['base']}: {ratio}, A/A {noise}"


def _dropout(found: Found) -> str:
    return f"a step of GPT-2 with dropout takes {found['ratio']:.2f} of one without"


def _float8(found: Found) -> str:
    if "skipped" in found:
        return f"skipped: {found['skipped']}"
    return "compiled: " + "; ".join(f"{name} {1e3 * row['s']:.0f} ms" for name, row in found["steps"].items())


def _attention(found: Found) -> str:
    rows = ((name, row.get("both_tflops")) for name, row in found["kernels"].items())
    return "forward and backward: " + "; ".join(
        f"{name} {speed:.0f} TFLOP/s" for name, speed in rows if speed
    )


def _memory(found: Found) -> str:
    rows = found["layouts"].items()
    return "allocated / planned: " + "; ".join(
        f"{name} {row['allocated / planned']:.3f}" for name, row in rows
    )


def _offload(found: Found) -> str:
    return "; ".join(
        f"{name} {1e3 * row['s']:.0f} ms, {row['peak'] / 1e9:.2f} GB, "
        f"{'same bits' if row['same bits'] else 'other bits'}"
        for name, row in found["plans"].items()
    )


def _checkpoint(found: Found) -> str:
    return (
        f"saved in {found['save_s']:.1f} s, loaded in {found['load_s']:.1f} s, {found['bytes'] / 1e9:.1f} GB"
    )


def _failure(found: Found) -> str:
    seconds = f"{found['seconds to exit']:.1f} s"
    return f"a rank that fails on {found['backend']} ends after {seconds}, with its traceback"


TEXTS: Mapping[str, Callable[[Found], str]] = MappingProxyType(
    {
        "environment": _environment,
        "parity": _parity,
        "drawn": _drawn,
        "races": _races,
        "speed": _speed,
        "dropout": _dropout,
        "float8": _float8,
        "attention": _attention,
        "memory": _memory,
        "offload": _offload,
        "checkpoint": _checkpoint,
        "failure": _failure,
    }
)
