"""The ranks as a group: in processes, in front of them, and the letters between."""
