"""The usage store: sums of samples for 400 days, the questions one can ask of them, and the report."""
