"""The pages of the documentation, and what generates those that follow from the source."""
