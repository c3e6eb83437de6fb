"""Who computes what: a rank's proposal, the vote, and the plan that follows from all votes."""
