"""The replay lab: what a policy would have bought on a trace."""
