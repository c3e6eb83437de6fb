"""Requests and what they hold: parameters, tokens, pages, rows of a step, and the counters of a rank."""
