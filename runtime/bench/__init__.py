"""What is measured: kernels, steps, ranks, whole workloads."""
