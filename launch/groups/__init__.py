"""Who am I, who are the others: launchers, meeting, one rank among processes."""
