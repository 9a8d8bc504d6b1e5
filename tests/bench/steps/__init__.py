"""Engine steps at production size: what one pays beside stock's own, with real advice in force."""
