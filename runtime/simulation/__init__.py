"""The real scheduler, heartbeat and routing under a virtual clock."""
