"""Requirements of the shared-memory tests: Linux and a C compiler. Without them the ranks use gloo, which is
tested elsewhere.

Without them the ranks use gloo, which is tested elsewhere.
"""

import pytest

from meshwright.comm.shared_memory.compile_library import SharedMemoryUnavailable, load_library


@pytest.fixture(autouse=True, scope="session")
def _it_can_be_had() -> None:
    try:
        load_library()
    except SharedMemoryUnavailable as error:
        pytest.skip(f"memory cannot be shared here: {error}")
