"""Which deployment serves a goal, and what others have reached."""
