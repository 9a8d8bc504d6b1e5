"""What engines really hold of sessions, as their sidecars tell a router."""
