"""What trains a model (backends) and what generates with it (rollouts)."""
