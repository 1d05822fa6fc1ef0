"""Climbing by single flips: a reference for policies, not part of them."""

import torch
from torch import Tensor

from dohyo.errors import DohyoError, whole
from dohyo.lab.rewards.quadratic import Quadratic
from dohyo.lab.rewards.reward import Reward


@torch.no_grad()
def polish(reward: Reward, x: Tensor) -> Tensor:
    """Each x after 1-flip local search: the best single flip, until none helps.

    Args:
        reward: A `Quadratic`, for which the gains of all d flips are updated in O(d) after a flip.
        x: (n, d), not changed; the result has its dtype.

    References:
        Merz and Freisleben, Greedy and local search heuristics for unconstrained binary quadratic programming (2002).

    Example:
        >>> polish(Quadratic([[3, -4], [-4, 5]]), torch.tensor([[1, 0], [0, 0]]))  # (1, 0) is a local maximum
        tensor([[1, 0],
                [0, 1]])
    """
    if not isinstance(reward, Quadratic):
        raise DohyoError(f"polish needs a quadratic reward, {reward.name} is {type(reward).__name__}")
    gain = reward.gain(x)
    bits = x.bool().clone()
    pairs = reward.weights.triu(1)
    pairs = (pairs + pairs.T).to(x.device)
    active = torch.arange(len(x), device=x.device)
    while len(active):
        best, flip = gain[active].max(1)
        keep = best > reward.tolerance
        active, flip = active[keep], flip[keep]
        own = bits[active]
        was = own.gather(1, flip[:, None])
        # Flipping bit k up adds w_kj to the slope of every j, down subtracts it; the slope is the gain where x_j = 0.
        change = torch.where(own == was, pairs[flip], -pairs[flip])
        gain[active] += change
        gain[active, flip] *= -1
        bits[active, flip] = ~was[:, 0]
    return bits.to(x.dtype)


def descent(reward: Reward, starts: int, generator: torch.Generator | None = None) -> Tensor:
    """(starts, d) local maxima, as int64: `polish` from uniformly random bits.

    Example:
        >>> from dohyo.lab.rewards import random_qpbo
        >>> reward = random_qpbo(30, seed=0)
        >>> found = descent(reward, 100, torch.Generator().manual_seed(0))
        >>> bool((reward.gain(found) <= 0).all())
        True
    """
    return polish(reward, torch.randint(2, (whole("starts", starts), reward.variables), generator=generator))
