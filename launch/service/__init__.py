"""Serving: the front door's process, gRPC, probes, metrics, the gateway beside it."""
