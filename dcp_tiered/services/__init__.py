"""Who does the work over time."""
