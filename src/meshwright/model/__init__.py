"""What the engine must know of a user's model, and how it drives a forward that nobody rewrote."""
