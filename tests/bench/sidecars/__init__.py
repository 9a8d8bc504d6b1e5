"""Real sidecar processes that can be killed and stopped, and a publisher of KV events that errs."""
