"""What a user may set, and what decides the things left open."""
