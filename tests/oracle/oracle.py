"""transformers as the judge of a decode: one teacher-forced float32 forward says what every step should have been.

If the argmax after prompt + tokens[:i] is tokens[i] for every i, then `tokens` is what greedy decoding there gives; and
the same forward holds every step's log-probabilities. One forward of the whole text costs less than 64 of one token.

What it can not judge. Its norms, softmax, router and rotary tables are float32 whatever the model's dtype, so it is no
float64 oracle: agreement here ends near 1e-6, and the float64 truth is our own naive reference. Where two experts (or
two tokens) score alike it takes the one `torch.topk` happens to find; `Verdict.margin` says how near the nearest such
choice was. It has no fp8 blocks that are partial, no `kimi_k2`, no multi-token prediction and no cache of ours.

T tokens  V vocabulary  E experts  K top-k
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What the oracle says about a text: for each judged step the log-probabilities, and how close its calls were.

    `logprobs_TV` is float64 [T, V], normalised in float64 from the oracle's float32 logits. `router_margin` is the
    smallest distance of a selected expert (or group) from the best one left out, over all layers and positions;
    `token_margin` the smallest distance of the best token's log-probability from the second's.
    """

    logprobs_TV: Tensor
    router_margin: float
    token_margin: float


class Oracle:
    """A transformers model in float32 with eager attention and eager experts. The model is open to a test's faults."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.gates = [module for name, module in model.named_modules() if name.endswith("mlp.gate")]

    @classmethod
    def load(cls, folder: Path, *, model_class: type[PreTrainedModel], config: PreTrainedConfig | None) -> "Oracle":
        """Load a folder; ValueError if its tensors and the model's are not one to one (its own answer is a report)."""
        model, report = model_class.from_pretrained(
            folder,
            config=config,
            dtype=torch.float32,
            attn_implementation="eager",
            experts_implementation="eager",
            output_loading_info=True,
        )
        complaints = {kind: names for kind, names in report.items() if names}
        if complaints:
            raise ValueError(f"transformers did not take {folder} as it is: {complaints}")
        return cls(model.eval())

    @torch.inference_mode()
    def judge(self, prompt: Sequence[int], tokens: Sequence[int]) -> Verdict:
        """Log-probabilities of the steps that produced `tokens` after `prompt`: T = len(tokens)."""
        text = torch.tensor([[*prompt, *tokens[:-1]]])
        with self.watched_gates() as margins:
            logits = self.model(input_ids=text, use_cache=False, logits_to_keep=len(tokens)).logits[0]
        logprobs_TV = logits.double().log_softmax(dim=-1)
        best = logprobs_TV.topk(2).values
        return Verdict(
            logprobs_TV=logprobs_TV,
            router_margin=min(margins, default=float("inf")),
            token_margin=float((best[:, 0] - best[:, 1]).min()),
        )

    @torch.inference_mode()
    def greedy(self, prompt: Sequence[int], num_tokens: int, *, stop: frozenset[int] = frozenset()) -> list[int]:
        """Greedy tokens with its own cache, one step at a time, up to and with the first one in `stop`."""
        cache, feed, tokens = None, torch.tensor([list(prompt)]), []
        while len(tokens) < num_tokens and not stop.intersection(tokens[-1:]):
            step = self.model(input_ids=feed, use_cache=True, cache=cache)
            cache = step.cache
            feed = step.logits[:, -1:].argmax(dim=-1)
            tokens.append(int(feed))
        return tokens

    @contextmanager
    def watched_gates(self) -> Iterator[list[float]]:
        """Collects the nearest choice of every router call inside."""
        margins: list[float] = []
        hooks = [
            gate.register_forward_hook(lambda gate, _, output: margins.append(nearest_choice(gate, output[0])))
            for gate in self.gates
        ]
        try:
            yield margins
        finally:
            for hook in hooks:
                hook.remove()


def nearest_choice(gate: nn.Module, logits_TE: Tensor) -> float:
    """Smallest score distance between the last taken and the first left out, of groups and of experts in kept groups.

    Softmax keeps the order of logits, so V2's distance is measured on logits: its scores are all near 1 / E.
    """
    if hasattr(gate, "e_score_correction_bias"):
        scores_TE, group_width = logits_TE.sigmoid() + gate.e_score_correction_bias, 2
    else:
        scores_TE, group_width = logits_TE, 1
    if (gate.num_group or 1) == 1:
        return gap(scores_TE, gate.top_k)
    grouped_TGE = scores_TE.unflatten(-1, (gate.num_group, -1))
    group_scores_TG = grouped_TGE.topk(group_width).values.sum(dim=-1)
    kept_TG = torch.zeros_like(group_scores_TG, dtype=torch.bool)
    kept_TG.scatter_(-1, group_scores_TG.topk(gate.topk_group).indices, True)
    kept_TE = grouped_TGE.masked_fill(~kept_TG[..., None], float("-inf")).flatten(-2)
    return min(gap(group_scores_TG, gate.topk_group), gap(kept_TE, gate.top_k))


def gap(scores: Tensor, num_taken: int) -> float:
    """Distance of the last taken from the first left out, smallest over rows; infinite if none is left out."""
    if num_taken == scores.shape[-1]:
        return float("inf")
    best = scores.topk(num_taken + 1).values
    return float((best[:, -2] - best[:, -1]).min())
