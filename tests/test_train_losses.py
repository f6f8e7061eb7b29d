"""The frozen-head loss against torch's own cross-entropy, degenerate batches, and block figures.

Does not know drafters or data.
"""

from __future__ import annotations

import pytest
import torch

from paceline.train.losses import (
    frozen_head_ce,
    frozen_head_distance,
    leading_run,
    position_weights,
)


@pytest.mark.parametrize("chunk", [3, 512])
def test_chunked_loss_equals_cross_entropy_with_gradient(chunk: int) -> None:
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(10, 6, generator=generator, requires_grad=True)
    head = torch.randn(23, 6, generator=generator)
    labels = torch.randint(0, 23, (10,), generator=generator)
    labels[3] = -100
    weights = torch.rand(10, generator=generator)
    weights[5] = 0.0
    loss = 3 * frozen_head_ce(states, head, labels, weights, chunk)
    (grad,) = torch.autograd.grad(loss, states)
    each = torch.nn.functional.cross_entropy(states @ head.T, labels, reduction="none")
    weights = weights * (labels >= 0)
    plain = 3 * (each * weights).sum()
    (expected,) = torch.autograd.grad(plain, states)
    torch.testing.assert_close(loss, plain)
    torch.testing.assert_close(grad, expected)


@pytest.mark.parametrize("chunk", [3, 512])
@pytest.mark.parametrize("kind", ["kl", "tv"])
def test_distances_to_the_target_equal_their_formulas_with_gradient(kind: str, chunk: int) -> None:
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(10, 6, generator=generator, requires_grad=True)
    head, teacher = (torch.randn(n, 6, generator=generator) for n in (23, 10))
    weights = torch.rand(10, generator=generator)
    weights[5] = 0.0
    loss = 3 * frozen_head_distance(states, head, teacher, weights, kind, chunk)
    (grad,) = torch.autograd.grad(loss, states)
    p, q = (teacher @ head.T).softmax(-1), (states @ head.T).softmax(-1)
    each = (p * (p / q).log()).sum(-1) if kind == "kl" else (p - q).abs().sum(-1) / 2
    plain = 3 * (each * weights).sum()
    (expected,) = torch.autograd.grad(plain, states)
    torch.testing.assert_close(loss, plain)
    torch.testing.assert_close(grad, expected)
    same = frozen_head_distance(teacher, head, teacher, weights, kind, chunk)
    assert abs(same.item()) < 1e-5


def test_bf16_distances_stay_finite_where_probabilities_underflow() -> None:
    states = torch.tensor([[60.0, 0.0], [0.0, 60.0]]).bfloat16().requires_grad_()
    head, teacher = torch.eye(2).bfloat16(), torch.tensor([[0.0, 60.0], [0.0, 60.0]]).bfloat16()
    for kind in ("kl", "tv"):
        loss = frozen_head_distance(states, head, teacher, torch.ones(2), kind)
        (grad,) = torch.autograd.grad(loss, states)
        assert loss.isfinite() and grad.isfinite().all()


def test_bf16_loss_is_close_to_the_float32_loss() -> None:
    generator = torch.Generator().manual_seed(1)
    states = torch.randn(64, 32, generator=generator).bfloat16().requires_grad_()
    head = torch.randn(500, 32, generator=generator).bfloat16()
    labels = torch.randint(0, 500, (64,), generator=generator)
    loss = frozen_head_ce(states, head, labels, torch.full((64,), 1 / 64))
    (grad,) = torch.autograd.grad(loss, states)
    exact = states.detach().float().requires_grad_()
    plain = torch.nn.functional.cross_entropy(exact @ head.float().T, labels)
    (expected,) = torch.autograd.grad(plain, exact)
    torch.testing.assert_close(loss, plain, rtol=0.02, atol=0.02)
    assert (grad.float() - expected).norm() < 0.02 * expected.norm()


def test_a_batch_without_labels_gives_zero_and_no_nan() -> None:
    states = torch.randn(4, 6, requires_grad=True)
    for labels, weights in (
        (torch.full((4,), -100), torch.ones(4)),
        (torch.zeros(4, dtype=torch.long), torch.zeros(4)),
    ):
        loss = frozen_head_ce(states, torch.randn(9, 6), labels, weights)
        (grad,) = torch.autograd.grad(loss, states)
        assert loss.item() == 0.0 and not grad.any()


def test_position_weights_decay_and_skip_unlabelled() -> None:
    weights = position_weights(torch.tensor([[[4, 5, -100]]]), gamma=2.0)
    torch.testing.assert_close(weights, torch.tensor([[[1.0, 0.60653066, 0.0]]]))


def test_leading_run_stops_at_the_first_wrong_draft() -> None:
    right = torch.tensor([[True, True, False, True], [False, True, True, True], [True] * 4])
    assert leading_run(right).tolist() == [2, 0, 4]
