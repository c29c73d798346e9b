"""Public fixtures for tests of parallel code: ranks as threads, ranks as processes."""
