"""Why prompts missed and blocks left, and what would have helped: the logs' codes in sentences."""
