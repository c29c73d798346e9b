"""Builds the profile of a fictitious device whose numbers follow from formulas."""

from meshwright.planner.machine.device_profile import (
    AttentionTiming,
    DeviceProfile,
    ElementwiseTiming,
    MatmulTiming,
    MemoryOpTiming,
)

CALL_S, RATE, FILL, TANH_S = 2e-6, 1e11, 40.0, 3e-9


def product_s(m: float, n: float, k: float, batch: float, rate: float = RATE) -> float:
    """Seconds of products: their call, their multiplications, and what filling a short inner dim costs."""
    return CALL_S + 2 * batch * m * n * (k + FILL) / rate


def attention_s(rows: float, heads: float, queries: float, keys: float, width: float) -> float:
    """Seconds of attention: its call, and its two products at half the rate."""
    return CALL_S + 4 * rows * heads * queries * keys * (width + 10) / (RATE / 2)


def profile(device: str = "Abacus 7", kind: str = "cpu", rate: float = RATE) -> DeviceProfile:
    """Returns what `bench device` would find on it."""
    sizes = [(m, n, k, 1) for m in (16, 128, 1024) for n in (64, 512, 4096) for k in (32, 256, 2048)]
    sizes += [(64, 64, 32, 16), (128, 128, 64, 64)]
    points = [
        MatmulTiming(m, n, k, batch, dtype, 2.0 * batch * m * n * k / product_s(m, n, k, batch, rate), 0.02)
        for dtype in ("float32", "bfloat16")
        for m, n, k, batch in sizes
    ]
    pairs = [
        (1, 4, 64, 64, 32),
        (8, 4, 64, 64, 64),
        (4, 8, 128, 128, 32),
        (2, 8, 128, 128, 64),
        (1, 8, 64, 512, 64),
    ]
    pairs += [(1, 4, 512, 512, 64), (2, 4, 512, 512, 128), (1, 2, 1024, 1024, 64)]
    seen = [
        AttentionTiming(*each, dtype, attention_s(*each), 2.5 * attention_s(*each))
        for dtype in ("float32", "bfloat16")
        for each in pairs
    ]
    moved = (
        MemoryOpTiming(4096, 4096 / CALL_S),
        MemoryOpTiming(1 << 20, rate / 5),
        MemoryOpTiming(64 << 20, rate / 20),
    )
    calls = (CALL_S, 1.5 * CALL_S)
    figures = tuple(points), tuple(seen), moved, (ElementwiseTiming("tanh", TANH_S, 0.02),)
    return DeviceProfile("2026-01-01", kind, device, "2.13", 2, 1, 32 << 30, *calls, *figures)
