"""What operators and agent frameworks want of blocks, outside of any request.

Every intent is answered: with what it reached, and why not with more.
"""
