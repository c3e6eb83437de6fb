"""How much of the attention is looked at at once.

Knows lengths; does not know what is cut by them (see `view` and `splits`).
"""

from dataclasses import dataclass, fields

__all__ = ["USUAL_TILING", "Tiling"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiling:
    """How much is looked at at once: memory and speed, never the result (beyond rounding). Raises ValueError below 1.

    Per layer at most (decode rows * split_tokens) latents are gathered, (context_chunk) prompt tokens are up-projected
    and (heads * query_block * context_chunk) scores exist.
    """

    split_tokens: int = 256
    """Context positions that a decode row gathers at once: few enough that a batch's latents stay in a CPU's cache."""
    context_chunk: int = 1024
    """Context positions of a prompt that are up-projected to keys and values at once."""
    query_block: int = 256
    """Prompt tokens whose scores against one context chunk exist at once."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) < 1:
                raise ValueError(
                    f"{field.name} = {getattr(self, field.name)}: must be at least 1 (usual: {field.default})"
                )


USUAL_TILING = Tiling()
