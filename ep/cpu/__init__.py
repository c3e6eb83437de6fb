"""ep.cpu: what kernels for a processor are written with, for every room: Numba's Python, and what it lacks."""
