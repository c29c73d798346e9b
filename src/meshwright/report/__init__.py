"""Shows plans and runs to people."""
