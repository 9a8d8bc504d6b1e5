"""How much new context an engine has room for while it computes again what it held before.

The valve finds a limit by feedback, the demand says what live sessions take of it, and wording
tells people how many fit and who waits.
"""
