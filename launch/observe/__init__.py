"""Looking at machines, running groups and failed ones: doctor and top."""
