"""Looking without a cluster: simulated groups, routing, graphs, recorded expert load."""
