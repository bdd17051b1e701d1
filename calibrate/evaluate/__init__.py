"""Baselines, fidelity, needles and reasoning: what a scale does to the model."""
