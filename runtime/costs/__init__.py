"""What a step takes: the cost model, and what is known of a device."""
