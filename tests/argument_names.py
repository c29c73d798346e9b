"""What pytest calls the arguments of a test: the same in every process."""

from types import FunctionType


def named(value: object) -> str:
    """Its name, or what it says of itself; no address."""
    return value.__name__ if isinstance(value, FunctionType | type) else str(value)
