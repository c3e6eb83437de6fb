"""Latents from elsewhere: connectors, leases, pages on their way."""
