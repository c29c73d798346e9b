"""Bytes as people read them."""


def size(nbytes: float) -> str:
    """Bytes in the unit that fits, three digits."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.3g} TiB"
