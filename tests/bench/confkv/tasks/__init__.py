"""What must be remembered to be answered: codes in a text, facts, pages that an agent reads."""
