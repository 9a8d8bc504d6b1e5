"""What recall brings back, what that is worth, and whether anybody else ever meets it."""
