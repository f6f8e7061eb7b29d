"""Verify finds what it must: a biased drafter rule is a bug, a tie is a tie.

Does not know real models.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline import pipeline as pipelines
from paceline.core import SamplingParams, Verdict
from paceline.decode.accept import match
from paceline.drafters.model import ModelDrafter
from paceline.evaluate.verify import ExactArithmetic, check_distribution, judge, verify
from paceline.pipeline import Pipeline
from tiny import tiny_target

PARAMS = SamplingParams(max_tokens=3, temperature=1.0, top_k=6)


def make(accept: str) -> Pipeline:
    target = tiny_target()
    draft = tiny_target("llama", seed=5)
    drafter = ModelDrafter(draft, target, num_drafts=2, samples=accept == "rejection")
    return Pipeline(target=target, drafter=drafter, accept=accept)


@pytest.mark.parametrize("accept", ["match", "rejection"])
def test_exact_rules_pass_the_distribution_test(accept: str) -> None:
    figures = check_distribution(make(accept), [3, 4, 5], PARAMS, 400)
    assert figures["bugs"] == 0 and len(figures["distribution"]) == 3


def test_a_rule_that_trusts_every_draft_is_a_bug(monkeypatch) -> None:
    def trusting(draft, law, rows):
        verdict = match(draft, law, rows)
        tokens = [
            draft.tokens_BN[b].tolist()[:size] + verdict.tokens[b][-1:]
            for b, size in enumerate(draft.sizes_B)
        ]
        return Verdict(tokens=tokens, paths=[list(range(size)) for size in draft.sizes_B])

    exact = make("match")
    monkeypatch.setitem(pipelines._RULES, "match", trusting)
    assert check_distribution(exact, [3, 4, 5], PARAMS, 400)["bugs"] > 0
    greedy = verify(exact, [[3, 4, 5]], SamplingParams(max_tokens=8))
    assert greedy["bugs"] == 1


def test_a_first_difference_is_judged_by_its_margin() -> None:
    pipeline, prompt = make("match"), [3, 4, 5]
    logits = pipeline.target.next_logits(prompt)
    best, second, *_, worst = logits.argsort(descending=True).tolist()
    exact, greedy = ExactArithmetic(pipeline.target), SamplingParams()
    assert judge(pipeline, exact, 0, prompt, [best], [worst], greedy).verdict == "bug"
    found = judge(pipeline, exact, 0, prompt, [best], [second], greedy)
    assert found.margin == pytest.approx(float(logits[best] - logits[second]), abs=1e-5)
    with pytest.raises(ValueError, match="temperature"):
        check_distribution(pipeline, prompt, replace(PARAMS, temperature=0.0), 400)
    with pytest.raises(ValueError, match="without a drafter"):
        check_distribution(pipeline.plain(), prompt, PARAMS, 400)
