"""What a request says of itself: whose turn of which session it is, and what its prompt is."""
