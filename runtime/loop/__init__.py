"""One rank's loop: steps launched, finished, run again, told and traced."""
