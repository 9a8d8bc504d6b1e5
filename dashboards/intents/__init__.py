"""What ``POST /v1/intents`` takes and answers: wishes of operators and agent frameworks."""
