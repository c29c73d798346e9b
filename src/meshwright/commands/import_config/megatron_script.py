"""Reads the arguments of a Megatron-LM job from a shell script, or from a file that lists them.

    GPUS_PER_NODE=8                                      a variable
    WORLD_SIZE=$(($GPUS_PER_NODE * $NNODES))             a product of variables
    GPT_ARGS="--num-layers 24 --hidden-size 1024"        words in a variable
    MODEL_ARGS=(--num-layers 24 --hidden-size 1024)      words in an array
    torchrun --nproc_per_node 8 pretrain_gpt.py $GPT_ARGS "${MODEL_ARGS[@]}"

Nothing is executed. Of a variable that the script takes from its own arguments, from the environment or from
another command, the value stays `$NAME`, and the option that has it is refused by name. Both branches of an
`if` are read; the later assignment of a variable counts.
"""

import re
import shlex
from collections.abc import Iterator
from math import prod

from meshwright.plan.job.errors import PlanError

ASSIGNMENT = re.compile(r"(?s)(\w+)(\+?)=(.*)")
VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?:\[[@*]\])?(?::?-([^}]*))?\})")
SUBSTITUTION = re.compile(r"\$\(\(([^()]*(?:\([^()]*\))?[^()]*)\)\)")
COMMAND_OUTPUT = re.compile(r"\$\((?!\()[^()]*\)|`[^`]*`")
ENDS = ("|", "||", "&&", ";", "&", ">", ">>", "2>&1", "2>", "tee")  # what begins another command
DECLARATIONS = ("export", "local", "declare", "readonly", "-a")
MAX_DEPTH = 20  # variables in variables


def read_arguments(text: str, location: str) -> dict[str, str | bool | list[str]]:
    """Returns the arguments by name, without dashes: a string, a list of several, or True for a flag.

    Raises PlanError if the text has unbalanced quotes, or no arguments.
    """
    try:
        commands, variables = _statements(_prepared(text))
    except ValueError as error:
        raise PlanError(
            f"this is no shell script, nor a list of arguments: {error}",
            fix="balance its quotes, or write the arguments into a file of their own",
            location=location,
        ) from error
    words = [word for command in commands for word in _expand_words(command, variables)]
    if not any(word.startswith("--") for word in words):  # nothing but arrays, as in a sourced file
        words = [
            word for value in variables.values() for part in value for word in _expand_word(part, variables)
        ]
    arguments = dict(_arguments(words))
    if not arguments:
        raise PlanError(
            "there are no arguments (--name value) in this file",
            fix="name the script that starts pretrain_gpt.py, or a file with its arguments",
            location=location,
        )
    return arguments


def _prepared(text: str) -> str:
    """The text with continued lines joined, and substitutions as one word each."""
    text = re.sub(r"\\\r?\n", " ", text)
    text = SUBSTITUTION.sub(lambda found: "$((" + re.sub(r"\s", "", found[1]) + "))", text)
    return COMMAND_OUTPUT.sub("$OUTPUT_OF_A_COMMAND", text)


def _statements(text: str) -> tuple[list[list[str]], dict[str, list[str]]]:
    """The words of commands, and the words of each variable: one, or those of an array."""
    commands, variables = list[list[str]](), dict[str, list[str]]()
    array = ""  # the name of the array whose end has not been met
    for line in _lines(text):
        command = list[str]()
        for word in shlex.split(line, comments=True):
            found = ASSIGNMENT.fullmatch(word) if not command and not array else None
            if found is not None:
                name, appends, value = found.groups()
                scalar = [] if value.startswith("(") else [_expanded_text(value, variables)]
                variables[name] = [*(variables.get(name, []) if appends else []), *scalar]
                array, word = ("", value) if scalar else (name, value[1:])
            if array:
                ends = word.count(")") > word.count("(")  # a value may have brackets of its own: ([0]*3+[1])
                word = word[:-1] if ends else word
                variables[array] += [word] if word else []
                array = "" if ends else array
            elif found is None and word not in DECLARATIONS:
                command.append(word)
        commands += [command] if command else []
    return commands, variables


def _lines(text: str) -> Iterator[str]:
    """The lines of a script; one whose quotes are open continues on the next."""
    kept = ""
    for line in text.splitlines():
        kept = f"{kept}\n{line}" if kept else line
        try:
            shlex.split(kept, comments=True)
        except ValueError:
            continue
        yield kept
        kept = ""
    if kept:
        yield kept


def _expand_words(words: list[str], variables: dict[str, list[str]]) -> Iterator[str]:
    for word in words:
        if word in ENDS:
            return
        yield from _expand_word(word, variables)


def _expand_word(word: str, variables: dict[str, list[str]], depth: int = 0) -> Iterator[str]:
    """The words that a word becomes; a variable that the script does not set stays."""
    whole = VARIABLE.fullmatch(word)
    name = (whole[1] or whole[2]) if whole else ""
    if depth < MAX_DEPTH and name in variables:
        for value in variables[name]:
            for part in shlex.split(value) if " " in value or "\n" in value else [value]:
                yield from _expand_word(part, variables, depth + 1)
        return
    text = _expanded_text(word, variables)
    yield from shlex.split(text) if text != word and " " in text else [text]


def _expanded_text(text: str, variables: dict[str, list[str]]) -> str:
    """A word with its variables and products replaced."""
    for _ in range(MAX_DEPTH):
        replaced = VARIABLE.sub(
            lambda found: (
                " ".join(variables[found[1] or found[2]])
                if (found[1] or found[2]) in variables
                else found[0]
                if found[3] is None
                else found[3]
            ),
            text,
        )
        replaced = SUBSTITUTION.sub(lambda found: _product(found, variables), replaced)
        if replaced == text:
            return text
        text = replaced
    return text


def _product(found: re.Match[str], variables: dict[str, list[str]]) -> str:
    """The value of a product or quotient of whole numbers and variables; anything else stays."""
    named = re.sub(r"[A-Za-z_]\w*", lambda name: "".join(variables.get(name[0], [name[0]])), found[1])
    numbers = re.fullmatch(r"(\d+)((?:[*/]\d+)*)", named.replace("(", "").replace(")", ""))
    if numbers is None:
        return found[0]
    factors = re.findall(r"([*/])(\d+)", numbers[2])
    value = int(numbers[1]) * prod(int(each) for sign, each in factors if sign == "*")
    for each in (int(number) for sign, number in factors if sign == "/"):
        value = value // each if each else value
    return str(value)


def _arguments(words: list[str]) -> Iterator[tuple[str, str | bool | list[str]]]:
    name, values = "", list[str]()
    for word in [*words, "--"]:
        is_option = re.match(r"--?[A-Za-z]", word) is not None or word == "--"
        if is_option or word.endswith((".py", ".sh")):
            if name:
                yield name, values[0] if len(values) == 1 else values or True
            name, equals, value = word.lstrip("-").partition("=") if word.startswith("--") else ("", "", "")
            values = [value] if equals else []
        elif name and word:
            values.append(word)
