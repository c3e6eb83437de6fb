"""Expert load: how much each expert is used, and how evenly a placement spreads that over the ranks."""

from .load import ExpertLoad, LoadWindow, balancedness, rank_loads

__all__ = ["ExpertLoad", "LoadWindow", "balancedness", "rank_loads"]
