"""The benchmarks as commands, their figures, tables and pages."""
