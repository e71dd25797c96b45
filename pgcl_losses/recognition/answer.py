"""`recognize`: call a function, look for it among the candidates, and say what it is."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from pgcl_losses.recognition.candidates import HARD, TWO_VIEWS, UNMASKED, WITH_LABELS
from pgcl_losses.recognition.fit import Fit, Search, search_for
from pgcl_losses.recognition.line import CONSTANT, Recognized, described, loss_of
from pgcl_losses.recognition.probe import (
    NUM_LARGE,
    SIZES,
    Facts,
    Function,
    NotFiniteError,
    batch,
    changing,
    facts,
    probe,
    untouched,
)

# Relative errors of a gradient.
_NEAR = 0.05  # a loss of ours with a difference that has a name is nearly the function
_SMALL = 1e-3  # whatever is smaller is nearly our loss, also without a name
_SMALL_SINGLE = 5e-3  # the same in float32, which is that inexact at temperatures of 0.01
_HELPFUL = 0.1  # the nearest loss is shown
_SMALL_REASONS = "as from an epsilon, rounding, a small further term or another change"
_UNDETERMINED = "one temperature is as good as another: its softmax is flat, or 0 and 1"
_LARGE = "it may take some of the negatives alone, leave out similar ones, or cut the batch"
_FURTHER = "it has a further term, or a change that is not known here"
_OTHER = (
    "it knows scores alone, as our losses do, but has other positives, negatives or weights, or it "
    "changes the scores, as by a clamp"
)


def recognize(function: Function, *, labels: bool = False, dim: int | None = None) -> Recognized:
    """Find out which ``InfoNCE`` a function of yours is: its options, its factor, its names.

    The function is called with two views ``[N, D]`` of random batches on the CPU, or with
    embeddings and their labels, and returns a scalar. It must not have other inputs that change:
    wrap it as ``lambda z1, z2: model.loss(z1, z2, temperature=0.5)``.

    The answer is exact if value and gradient agree on all batches, to rounding; nearly, if a small
    difference remains, which is named if it is known; "unit", if they agree for embeddings of
    length 1 alone; otherwise the function is no loss of this package, and the answer has facts
    about the function, and the nearest loss if there is one.

    Modules that the function uses by name, or is a method of, have afterwards the parameters,
    buffers, gradients and mode that they had before. So have the states of random numbers.

    Args:
        function (callable): a function of two views, or of embeddings ``[N, D]`` and labels
            ``[N]``.
        labels (bool): whether the second argument of the function are labels.
        dim (int or None): D, for a function that takes embeddings of one dimension only. By default
            the batches have different dimensions.

    Examples:
        >>> import torch
        >>> import torch.nn.functional as F
        >>> from pgcl_losses import recognize
        >>> def my_loss(z1, z2):
        ...     scores = F.normalize(z1) @ F.normalize(z2).T / 0.1
        ...     return 2 * F.cross_entropy(scores, torch.arange(len(z1)))
        >>> found = recognize(my_loss)
        >>> found.kind, found.line
        ('exact', '2 * InfoNCE(temperature=0.1, negatives="cross", queries="first")(z1, z2)')

    """
    batches = [batch(seed, n, dim or each) for seed, (n, each) in enumerate(SIZES)]
    with untouched(function):
        missing: tuple[str, ...] = ()
        try:
            first = probe(function, batches[0], labels)
            if why := changing(function, first, labels):
                return _none(why)
            try:
                probes = [probe(function, views, labels) for views in batches]
            except NotFiniteError as error:
                if not labels:
                    raise
                missing = (str(error),)
                del batches[2]  # it has classes of one member
                probes = [probe(function, views, labels) for views in batches]
            if not any(x.gradient.any() for x in probes):
                return _none("its gradient is 0")
            search = search_for(probes, labels)
            found = _answer(search, labels, partial(facts, function, first, labels))
        except NotFiniteError as error:
            found = _none(str(error))
        if found.kind == "none":
            return _of_units(function, batches, labels) or found
    kind = "nearly" if missing and found.kind == "exact" else found.kind
    return replace(found, kind=kind, differences=(*found.differences, *missing))


def _none(*reasons: str) -> Recognized:
    return Recognized("none", reasons)


def _of_units(function: Function, batches: list[list[Tensor]], labels: bool) -> Recognized | None:
    """Look for a plain loss that the function is for embeddings of length 1."""

    def on_unit_vectors(z: Tensor, *others: Tensor) -> Any:
        return function(*[F.normalize(x) if x.is_floating_point() else x for x in (z, *others)])

    try:
        search = search_for([probe(on_unit_vectors, views, labels) for views in batches], labels)
    except (NotFiniteError, TypeError):
        return None
    best = search.fits(WITH_LABELS if labels else TWO_VIEWS)[0]
    found = described(best, search)
    is_near = best.error <= max(search.tolerance, 1e-6) and search.is_determined(best)
    return replace(found, kind="unit") if is_near and found.kind == "exact" else None


def _answer(search: Search, labels: bool, facts: Callable[[], Facts]) -> Recognized:
    """Say which candidate a function is, or why it is none."""
    fits = search.fits(WITH_LABELS if labels else TWO_VIEWS)
    plain, found = fits[0], described(fits[0], search)
    if plain.error > 100 * search.tolerance and (why := _of_few(fits, search, labels)):
        return _none(why)
    is_right = plain.error <= search.tolerance and search.is_determined(plain)
    if is_right and CONSTANT not in found.differences:
        return found
    excluding, others = facts()
    if is_right:
        return _none(*excluding) if excluding else found
    further = None if labels or excluding else _further(fits, search)
    if further and (further.candidate.is_ours() or plain.error <= _NEAR):
        return described(further, search)
    if further:
        named = described(further, search)
        return _none(f"it would be {named.line}, but {named.differences[0]}")
    if plain.error < (_SMALL_SINGLE if search.is_single else _SMALL):
        if not search.is_determined(plain):
            return _none(_UNDETERMINED)
        why = f"its gradient differs by {plain.error:.0e}, {_SMALL_REASONS}"
        return replace(found, kind="nearly", differences=(*found.differences, why))
    if excluding:
        return _none(*excluding, *others)
    if plain.error < _HELPFUL and found.line.count("InfoNCE") == 1:
        return replace(found, kind="none", differences=tuple(others or [_FURTHER]))
    return _none(*(others or [_OTHER]))


def _further(fits: list[Fit], search: Search) -> Fit | None:
    """Find a loss with a difference, or with hard or debiased negatives, that is the function."""
    changed = [x for fit in fits[:2] for x in fit.candidate.changed()]
    for candidates in (UNMASKED, changed, *[HARD] * (fits[0].error > _SMALL)):
        found = search.fits(candidates)[0]
        is_nearer = found.error <= min(search.tolerance, 0.1 * fits[0].error)
        if is_nearer and search.is_determined(found):
            return found
    return None


def _of_few(fits: list[Fit], search: Search, labels: bool) -> str:
    """Why a function is none that agrees with a loss of ours on each of the small batches."""
    for fit in fits:
        if fit.alone[:-NUM_LARGE].max() <= search.tolerance:
            first = search_for(search.probes[:1], labels)
            there = first.at(fit.candidate, fit.numbers)
            if not first.is_determined(there):
                return _UNDETERMINED
            if fit.alone.max() <= search.tolerance:
                why = "its factor or its value depends on the batch; up to that it is"
                return f"{why} {loss_of(there, first)}"
            errors = zip(search.probes, fit.alone, strict=True)
            most = max(len(x.views[0]) for x, error in errors if error > search.tolerance)
            few = f"for few graphs it is {loss_of(there, first)}"
            return f"{few}, but not for {most}: {_LARGE}"
    return ""
