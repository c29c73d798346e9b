"""What a plan will cost, read from the plan alone: nothing is run, and torch is not needed."""
