"""Real engines under test: model, processes, clients, workload."""
