"""Sessions as the page shows them: who is here, and one of them over time."""
