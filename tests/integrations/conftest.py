"""Fixtures of the integrations."""

import pytest
import tqdm


@pytest.fixture(autouse=True)
def no_monitor_of_progress_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep tqdm from starting its thread, which would outlive a test."""
    monkeypatch.setattr(tqdm.tqdm, "monitor_interval", 0)
