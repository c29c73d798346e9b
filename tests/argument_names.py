"""Names of test arguments in pytest ids: the same in every process."""

from types import FunctionType


def argument_name(value: object) -> str:
    """Its name, or what it says of itself; no address."""
    return value.__name__ if isinstance(value, FunctionType | type) else str(value)
