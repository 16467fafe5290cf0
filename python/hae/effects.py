"""What a policy does to a model's answer: closed-loop figures of one sequence."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Tokens
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel

from hae.hf import Generated, Prepared, generate, recording, teacher_forced

if TYPE_CHECKING:
    from hae._engine import Sequence
    from hae.comparison import AnyPolicy, Run


@dataclass(frozen=True)
class Reference:
    """A sequence with the full cache.

    answer    generated freely, or given: what is forced
    sequence  its recording, for the open loop
    """

    prompt: Prepared
    answer: Generated
    sequence: Sequence


def reference(
    model: PreTrainedModel,
    prompt: Prepared,
    *,
    max_new_tokens: int,
    answer: Tokens[int] | None = None,
    name: str = "sequence",
    group: str = "",
) -> Reference:
    """Runs the full cache, and records it.

    answer  to be forced; None: what the model itself says, greedily
    """
    with recording(model, prompt, name=name, group=group) as recorded:
        if answer is None:
            full = generate(model, prompt, None, max_new_tokens=max_new_tokens, name=name)
        else:
            full = teacher_forced(model, prompt, None, answer, name=name)
        return Reference(prompt, full, recorded())


@dataclass(frozen=True)
class Effect:
    """Against the full cache, of one answer of n tokens.

    kl              mean over the answer's tokens of KL(full || evicting) of the next-token
                    distributions, in nats, the answer being forced
    agreement       share of them where both find the same token most likely
    nll_increase    mean rise of the negative log-likelihood of the forced tokens
    token_accuracy  share of the full cache's tokens that the free-running answer has in place
    same            whether the free-running answer is the full cache's
    exact           whether it is the right answer; None when that is not known
    The free-running ones are None when only the forced answer was run.
    """

    kl: float
    agreement: float
    nll_increase: float
    token_accuracy: float | None = None
    same: bool | None = None
    exact: bool | None = None


def forced_effect(full: Generated, evicting: Generated) -> Effect:
    """Of two runs that were fed the same answer."""
    p, q = (one.logits.double().log_softmax(-1) for one in (full, evicting))
    forced = torch.tensor(full.tokens, device=p.device)[:, None]
    return Effect(
        kl=float((p.exp() * (p - q)).sum(-1).clamp(min=0).mean()),
        agreement=float((p.argmax(-1) == q.argmax(-1)).double().mean()),
        nll_increase=float((p.gather(1, forced) - q.gather(1, forced)).mean()),
    )


def effect(
    model: PreTrainedModel,
    of: Reference,
    policy: AnyPolicy,
    *,
    is_right: Callable[[list[int]], bool] | None = None,
    max_new_tokens: int | None = None,
    name: str = "sequence",
) -> tuple[Effect, Run]:
    """What a policy does to one sequence. Returns the run with the forced answer too: its log, and
    what it measured on the model's own rows.

    is_right        whether a free-running answer's tokens, the end token included, are right
    max_new_tokens  of the free-running answer; None: only the forced one is run
    """
    forced = teacher_forced(model, of.prompt, policy, of.answer.tokens, name=name)
    found = forced_effect(of.answer, forced)
    if max_new_tokens is not None:
        full = of.answer.tokens
        free = generate(model, of.prompt, policy, max_new_tokens=max_new_tokens, name=name).tokens
        found = Effect(
            found.kl,
            found.agreement,
            found.nll_increase,
            token_accuracy=sum(a == b for a, b in zip(free, full, strict=False)) / len(full),
            same=free == full,
            exact=None if is_right is None else is_right(free),
        )
    return found, forced.run
