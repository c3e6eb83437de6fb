"""Who failed: where each rank stands, the pulse beside it, the judge, and the record of the last steps."""
