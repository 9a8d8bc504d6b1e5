"""What real vLLM servers show to an unmodified OpenAI client of what the graph understands."""
