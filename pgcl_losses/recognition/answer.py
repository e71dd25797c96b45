"""`recognize`: call a function, look for it among the candidates, and say what it is."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pgcl_losses.recognition.candidates import HARD, TWO_VIEWS, WITH_LABELS
from pgcl_losses.recognition.fit import Fit, Growth, Search, differences
from pgcl_losses.recognition.line import TINY, Recognized, Words
from pgcl_losses.recognition.probe import (
    SIZES,
    Facts,
    Function,
    NotFiniteError,
    Probe,
    batch,
    changing,
    facts,
    labels_of,
    probe,
    untouched,
)

_LOOKED_FOR = 0.3  # the relative error of a gradient up to which differences are looked for
_NEAR = 0.05  # up to which a loss of ours with a difference is nearly the function
_HELPFUL = 0.1  # up to which the nearest loss is shown
_POWERS = (0.0, 0.5, -1.0, -0.5, 2.0)  # of N, in a factor


def recognize(function: Function, *, labels: bool = False, dim: int | None = None) -> Recognized:
    """Find out which ``InfoNCE`` a function of yours is: its options, its factor, its names.

    The function is called with two views ``[N, D]`` of small random batches on the CPU, or with
    embeddings and their labels, and returns a scalar. It must not have other inputs that change:
    wrap it as ``lambda z1, z2: model.loss(z1, z2, temperature=0.5)``.

    The answer is exact if value and gradient agree on all batches, to rounding; nearly, if they
    agree after a small difference was added to our loss, which is named; "unit", if they agree for
    embeddings of length 1 alone; otherwise the function is no loss of this package, and the answer
    has facts about the function, and the nearest loss if there is one. What the function does only
    for other inputs, such as large batches, is not seen.

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
    sizes = [(n, dim or each) for n, each in SIZES]
    batches = [batch(seed, *size) for seed, size in enumerate(sizes)]

    def probed(function: Function) -> list[Probe]:
        return [probe(function, views, labels) for views in batches]

    with untouched(function):
        missing: tuple[str, ...] = ()
        try:
            first = probe(function, batches[0], labels)
            if why := changing(function, first, labels):
                return Recognized("none", (why,))
            try:
                probes = probed(function)
            except NotFiniteError as error:
                if not labels:
                    raise
                missing = (str(error),)
                batches[-1] = batch(len(sizes) - 1, 10, sizes[-1][1])  # no class of one member
                probes = probed(function)
        except NotFiniteError as error:
            return _of_units(function, batches, labels, Recognized("none", (str(error),)))
        if not any(x.gradient.any() for x in probes):
            return Recognized("none", ("its gradient is 0",))
        found = _found(probes, labels, partial(facts, function, first, labels))
        if found.kind == "none":
            return _of_units(function, batches, labels, found)
    kind = "nearly" if missing and found.kind == "exact" else found.kind
    return replace(found, kind=kind, differences=(*found.differences, *missing))


def _of_units(
    function: Function, batches: list[list[Tensor]], labels: bool, otherwise: Recognized
) -> Recognized:
    """Look for a plain loss that the function is for embeddings of length 1."""

    def of_units(z: Tensor, *others: Tensor) -> Any:
        return function(*[F.normalize(x) if x.is_floating_point() else x for x in (z, *others)])

    try:
        probes = [probe(of_units, views, labels) for views in batches]
    except (NotFiniteError, TypeError):
        return otherwise
    search = _search(probes, labels)
    best = search.fits(WITH_LABELS if labels else TWO_VIEWS)[0]
    if best.error > max(search.tolerance, TINY) or not search.is_determined(best):
        return otherwise
    found = Words(probes, labels, search.tolerance).of(best)
    is_ours = found.kind == "exact" and not best.candidate.differences
    return replace(found, kind="unit") if is_ours else otherwise


def _search(probes: list[Probe], labels: bool) -> Search:
    tolerance = 3e-5 if all(x.is_single() for x in probes) else 1e-9
    return Search(probes, _growths(probes, labels), tolerance)


def _found(probes: list[Probe], labels: bool, facts: Callable[[], Facts]) -> Recognized:
    """Find the candidate that a function is."""
    search = _search(probes, labels)
    words, tolerance = Words(probes, labels, search.tolerance), search.tolerance
    found = search.fits(WITH_LABELS if labels else TWO_VIEWS)
    best, plain, known = found[0], found[0], Facts((), ())
    if best.error > tolerance or not search.is_determined(best):
        known = facts()
        if not labels and not known.excluding and plain.error_alone > tolerance:
            near = [fit for fit in found if fit.error < _LOOKED_FOR][:2]
            best = _nearest(plain, *map(search.with_differences, near))
            if best.error > tolerance and plain.error > TINY:
                found = sorted([*found, *search.fits(HARD)], key=lambda fit: fit.error)
                best = _nearest(best, found[0])
            if tolerance < found[0].error < _NEAR and best is found[0]:
                best = _nearest(best, search.with_differences(best))
    if best.error <= tolerance and search.is_determined(best):
        described, more = words.of(best), differences(best)
        is_near = not more or min(x.error for x in found) < _NEAR
        if described.kind != "none" and is_near and not best.candidate.differences:
            same = [x for x in found if x.error <= tolerance and x is not best]
            also = [f"on these batches {words.of(x).line} is the same" for x in same]
            return replace(described, differences=(*described.differences, *also))
        ours = "one of ours" if described.kind == "none" else described.line
        reasons = " and ".join(more or described.differences)
        return Recognized("none", (f"it would be {ours}, but {reasons}",))
    described, all_facts = words.of(plain), (*known.excluding, *known.others)
    if known.excluding:
        return Recognized("none", all_facts)
    if plain.error < _HELPFUL and not search.is_determined(plain):
        why = "one temperature is as good as another: its softmax is 0 and 1"
        return Recognized("none", (why,))
    if plain.error_alone <= tolerance:
        why = f"its factor or its value depends on the batch; up to that it is {described.loss}"
        return Recognized("none", (why,))
    is_ours = not plain.candidate.differences
    if is_ours and plain.error < words.tiny() and described.kind != "none":
        why = f"the gradient differs by {plain.error:.0e}, as by an epsilon somewhere"
        return replace(described, kind="nearly", differences=(*described.differences, why))
    if is_ours and plain.error < _HELPFUL and described.is_even():
        further = "it has a further term, or a change that is not known here"
        return replace(described, kind="none", differences=known.others or (further,))
    other = "it knows scores alone, as our losses do, but has other positives, negatives or weights"
    return Recognized("none", all_facts or (other,))


def _nearest(*found: Fit) -> Fit:
    return min(found, key=lambda fit: fit.error)


def _growths(probes: Sequence[Probe], labels: bool) -> list[Growth]:
    """How the factor of a function may grow with the batch."""
    sizes = queries = torch.tensor([len(x.views[0]) for x in probes]).double()
    if labels:  # our mean is over queries with a positive
        every = [labels_of(len(x.views[0])) for x in probes]
        have_positives = [of_batch.bincount()[of_batch] > 1 for of_batch in every]
        queries = torch.stack([mask.sum() for mask in have_positives]).double()
    growths = [Growth(power, sizes**power) for power in _POWERS]
    growths.insert(1, Growth(1.0, queries))
    if not torch.equal(queries, sizes):
        over_all = "a query without a positive is 0 in its mean"
        growths += [Growth(x.power, x.factors * queries / sizes, over_all) for x in growths]
    return growths
