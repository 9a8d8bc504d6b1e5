"""A closed loop: users who wait for an answer before they ask again, and one engine.

Here engines collapse under too many users, and holding new sessions may prevent it.
"""
