"""The front door's inside: requests in the house, streams, admission, the ranks as a group."""
