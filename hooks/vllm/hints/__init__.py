"""What callers say of their requests: whose word counts, and what the words are."""
