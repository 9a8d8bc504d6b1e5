"""What runs inside an engine: observe its blocks, take advice, never get in its way."""
