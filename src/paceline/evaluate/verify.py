"""Does speculation change the output? Compares with plain decoding and judges each difference.

Knows nothing about how drafts are made.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from paceline.core import Completion, Noise, SamplingParams
from paceline.evaluate.metrics import acceptance
from paceline.pipeline import Pipeline

FP32_TIE = 1e-3  # a margin that differently ordered fp32 sums may overturn
LIKELY = 100  # rounding is measured on so many of the most probable tokens


class ExactArithmetic:
    """The target's own weights, computed with in fp32: the umpire over two roundings.

    In bf16 a margin depends on the shape of the batch it was computed in, so neither side's own
    logits can judge. Costs four bytes per weight while it lives, and only once a reply differs.
    """

    def __init__(self, target: Any) -> None:
        self._target = target
        self._weights: dict[str, torch.Tensor] | None = None

    @torch.inference_mode()
    def next_logits(self, ids: list[int]) -> torch.Tensor:
        """Logits [V] after ids, fp32."""
        model = self._target.model
        if self._weights is None:
            named = [*model.named_parameters(), *model.named_buffers()]
            self._weights = {
                name: value.float() if value.is_floating_point() else value for name, value in named
            }
        tokens = torch.tensor([ids], device=self._target.device)
        arguments = {"input_ids": tokens, "use_cache": False, "logits_to_keep": 1}
        out = torch.func.functional_call(model, self._weights, kwargs=arguments)
        logits: torch.Tensor = out.logits[0, -1].float()
        return logits


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first divergence of one reply.

    ``margin`` says how far the less probable of the two tokens lies below the best one there, with
    the target's weights in fp32 arithmetic (sampled: how far logits must move apart before the
    same random number draws both, ``sampling_margin``); ``rounding`` how far the target's own
    dtype moved the most probable tokens' logits. None where one reply had already ended.
    """

    prompt: int
    position: int
    plain_token: int
    speculative_token: int
    margin: float | None
    rounding: float | None
    verdict: str


def verify(
    pipeline: Pipeline,
    prompts: Sequence[Any],
    params: SamplingParams,
    *,
    batch_size: int = 8,
    progress: Callable[[int], None] = lambda done: None,
) -> dict[str, Any]:
    """Generate every prompt with and without drafts; count identical, near-tie and bug.

    A near-tie is a first divergence at which both tokens lie within rounding of the best one:
    within twice what the dtype moves logits there, as measured against fp32 arithmetic. Anything
    else is a bug. Greedy, or seeded sampling under ``match`` in fp32.
    """
    _refuse_empty(pipeline, params, batch_size)
    pipeline.rows(prompts, params)  # bad prompts are named before any work is done
    differences: list[Difference] = []
    replies: list[Completion] = []
    exact = ExactArithmetic(pipeline.target)
    plain = pipeline.plain()
    for at in range(0, len(prompts), batch_size):
        part = prompts[at : at + batch_size]
        wanted = plain.generate(part, params, batch_size=batch_size)
        got = pipeline.generate(part, params, batch_size=batch_size)
        replies += [output.outputs[0] for output in got]
        for i, (a, b) in enumerate(zip(wanted, got, strict=True)):
            ids, other = a.outputs[0].token_ids, b.outputs[0].token_ids
            if ids != other:
                start = a.prompt_token_ids
                found = judge(pipeline, exact, at + i, start, ids, other, params)
                differences.append(found)
        progress(min(len(prompts), at + batch_size))
    verdicts = [difference.verdict for difference in differences]
    return {
        "prompts": len(prompts),
        "identical": len(prompts) - len(differences),
        "near_ties": verdicts.count("near-tie"),
        "bugs": verdicts.count("bug"),
        "dtype": pipeline.target.dtype_name,
        "max_new_tokens": params.max_tokens,
        "temperature": params.temperature,
        "acceptance_length_pooled": acceptance(replies).acceptance_length_pooled,
        "differences": [asdict(difference) for difference in differences],
    }


def _refuse_empty(pipeline: Pipeline, params: SamplingParams, batch_size: int) -> None:
    """A check that compares nothing, or judges by a rule that does not apply, must not pass."""
    if batch_size < 1:
        raise ValueError("batch_size must be at least 1")
    if pipeline.drafter is None:
        raise ValueError("without a drafter there is nothing to verify")
    if params.max_tokens < 1:
        raise ValueError("max_tokens must be at least 1")
    if params.temperature > 0 and pipeline.target.dtype != torch.float32:
        raise ValueError(
            "seeded replies agree token for token in fp32 only; use dtype fp32, or compare the "
            "distributions with samples"
        )


def distribution(
    pipeline: Pipeline, prompt: Any, params: SamplingParams, *, samples: int, batch_size: int = 32
) -> list[dict[str, float]]:
    """Two-sample chi-square per position: replies with drafts against replies without.

    Draws ``samples`` independent replies each way; tokens seen fewer than ten times together share
    a bin. Returns position, p-value and bins; a p-value below 1e-6 means another distribution.
    """
    replies: list[list[list[int]]] = []
    for which, first in ((pipeline.plain(), 0), (pipeline, samples)):
        seeded = [replace(params, seed=first + i, n=1) for i in range(samples)]
        outputs = which.generate([prompt] * samples, seeded, batch_size=batch_size)
        replies.append([output.outputs[0].token_ids for output in outputs])
    found: list[dict[str, float]] = []
    for position in range(params.max_tokens):
        counts = [
            Counter(ids[position] if position < len(ids) else -1 for ids in some)
            for some in replies
        ]
        both = counts[0] + counts[1]
        common = [token for token, times in both.items() if times >= 10]
        table = torch.tensor([[c[token] for token in common] for c in counts]).double()
        rest = samples - table.sum(1, keepdim=True)
        if float(rest.sum()) > 0:
            table = torch.cat((table, rest), dim=1)
        bins = table.shape[1]
        if bins < 2:
            found.append({"position": position, "p_value": 1.0, "bins": bins})
            continue
        expected = table.sum(0) / 2
        statistic = ((table - expected) ** 2 / expected).sum()
        p = torch.special.gammaincc(torch.tensor((bins - 1) / 2).double(), statistic / 2)
        found.append({"position": position, "p_value": float(p), "bins": bins})
    return found


def check_distribution(
    pipeline: Pipeline, prompt: Any, params: SamplingParams, samples: int
) -> dict[str, Any]:
    """The distribution test as figures; ValueError where it would say nothing."""
    if pipeline.drafter is None:
        raise ValueError("without a drafter there is nothing to verify")
    if params.temperature == 0 or samples < 100:
        raise ValueError("the distribution test needs temperature > 0 and samples >= 100")
    rows = distribution(pipeline, prompt, params, samples=samples)
    wrong = sum(row["p_value"] < 1e-6 for row in rows)
    return {"samples": samples, "accept": pipeline.accept, "bugs": wrong, "distribution": rows}


def judge(
    pipeline: Pipeline,
    exact: ExactArithmetic,
    prompt: int,
    start: list[int],
    wanted: list[int],
    got: list[int],
    params: SamplingParams,
) -> Difference:
    """Find the first divergence and look at the target's margin there.

    Of ``params`` the temperature and the seed count; other changes of the distribution are not
    looked at, so a near-tie that only they make is called a bug.
    """
    pairs = list(zip(wanted, got, strict=False))
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
    plain = wanted[at] if at < len(wanted) else -1
    other = got[at] if at < len(got) else -1
    margin, rounding, verdict = None, None, "bug"
    if plain >= 0 and other >= 0:
        ids = start + wanted[:at]
        logits = exact.next_logits(ids)
        likely = logits.topk(min(LIKELY, len(logits))).indices
        own = pipeline.target.next_logits(ids).float()
        if params.temperature > 0:
            number = Noise(params.seed).uniform("target", len(ids))
            margin = sampling_margin(logits, (plain, other), number, params.temperature)
        else:
            margin = float(logits.max() - torch.minimum(logits[plain], logits[other]))
        rounding = float((own - logits)[likely].abs().max())
        # Each of the two runs may have moved each token's logit by that much.
        verdict = "near-tie" if margin <= max(2 * rounding, FP32_TIE) else "bug"
    return Difference(
        prompt=prompt,
        position=at,
        plain_token=plain,
        speculative_token=other,
        margin=margin,
        rounding=rounding,
        verdict=verdict,
    )


def sampling_margin(
    logits: torch.Tensor, tokens: Sequence[int], u: float, temperature: float
) -> float:
    """How far logits [V] must move before the number ``u`` draws each of ``tokens``.

    0 where all of them are drawn as it is; only one can be. A draw is the first token whose
    cumulative probability exceeds u. Moving every logit by at most x changes the odds of "this
    token or an earlier one" by at most exp(2 x / temperature); the margin is that 2 x, so that it
    compares with the distance of two logits.
    """
    probs = (logits.double() / temperature).softmax(-1)
    below, above = probs.cumsum(-1), probs.flip(-1).cumsum(-1).flip(-1)

    def log_odds(count: int) -> float:
        """Of the first ``count`` tokens against the rest."""
        low = float(below[count - 1]) if count > 0 else 0.0
        high = float(above[count]) if count < len(probs) else 0.0
        return math.log(max(low, 1e-300)) - math.log(max(high, 1e-300))

    level = math.log(max(u, 1e-300)) - math.log1p(-u)
    return temperature * max(
        max(0.0, log_odds(token) - level, level - log_odds(token + 1)) for token in tokens
    )
