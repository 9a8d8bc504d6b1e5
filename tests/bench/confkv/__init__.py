"""A cache that reads the model's confidence, beside caches with a static budget, on real models."""
