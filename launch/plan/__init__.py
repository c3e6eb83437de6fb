"""The planner: memory, goals, arithmetic, warnings, deployments, command lines of vLLM."""
