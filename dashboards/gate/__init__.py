"""What is let in before any of it is looked at: from where, how much, and for how long."""
