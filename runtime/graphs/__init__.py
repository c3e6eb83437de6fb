"""Whose hands a pass runs by: kernel by kernel, or as recorded graphs."""
