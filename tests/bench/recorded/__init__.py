"""Recorded agents as requests to a real engine: texts, answers, and the trace they leave."""
