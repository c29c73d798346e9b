"""Memory of a step: what is computed again instead of kept."""
