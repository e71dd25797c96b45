"""Arbitrary tensors give a documented error or the oracle's value, and never crash.

For more cases: FUZZ_CASES=2000 python -m pytest tests/core/test_fuzz.py
"""

import functools
import itertools
import math
import os
import warnings

import numpy as np
import pytest
import torch
from helpers import oracle
from helpers.cases import MODES
from helpers.item_cases import arrays, exact_losses, numbers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pgcl_losses import (
    InfoNCE,
    PGCLLoss,
    SinkhornPrototypes,
    diagnostics,
)

pytestmark = pytest.mark.slow

fuzz = settings(
    max_examples=int(os.environ.get("FUZZ_CASES", "200")),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
OTHERS = [torch.int64, torch.bool, torch.complex64]
SIZES = st.integers(0, 5)
ENGINES = ["auto", "blocks", "dense"]
# One in eight draws is invalid or unusual.
ODD = st.integers(0, 7).map(lambda number: number == 0)


@st.composite
def layouts(draw, rows):
    """The same values in memory of another shape."""
    wide = rows.new_zeros(*rows.shape[:-1], 2 * rows.shape[-1])
    wide[..., ::2] = rows
    kinds = [rows, rows.mT.contiguous().mT if rows.dim() > 1 else rows, wide[..., ::2]]
    return draw(st.sampled_from(kinds))


@st.composite
def tensors(draw, shape, dtype):
    """Of this shape and dtype, except for odd draws; in any layout, with or without gradient."""
    if draw(ODD):
        shape = draw(st.lists(SIZES, min_size=1, max_size=3))
    if draw(ODD):
        dtype = draw(st.sampled_from([*FLOATS, *OTHERS]))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    values = torch.from_numpy(random.normal(size=shape))
    if dtype.is_floating_point:
        values *= draw(st.sampled_from([1.0, 1.0, 1e-4, 1e4, 1e-15, 0.0]))
    if draw(ODD) and values.numel():
        values.view(-1)[0] = draw(st.sampled_from([math.nan, math.inf, -math.inf]))
    rows = (values > 0).to(dtype) if dtype == torch.bool else values.nan_to_num(0, 0, 0).to(dtype)
    if dtype.is_floating_point:
        rows = values.to(dtype)
    alike = draw(ODD) and len(rows)  # all rows share the memory of one
    rows = rows[:1].expand_as(rows) if alike else draw(layouts(rows))
    if draw(ODD):
        rows = rows.to("meta")
    return rows.requires_grad_(dtype.is_floating_point and draw(st.booleans()))


@st.composite
def problems(draw):
    """Two views and prototypes that mostly fit together."""
    n, d, k = draw(st.integers(1, 5)), draw(st.integers(1, 4)), draw(st.integers(1, 4))
    dtype = draw(st.sampled_from(FLOATS))
    views = [draw(tensors((n, d), dtype)) for _ in range(2)]
    prototypes = draw(tensors((k, d), draw(st.sampled_from(FLOATS))))
    return *views, prototypes


def attempt(function, *given):
    """What the function returns; None if it raises a documented error."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "PGCLLoss")
        try:
            return function(*given)
        except (TypeError, ValueError):
            return None


def known(*tensors):
    """Whether the oracle can compute with them."""
    return all(t.device.type == "cpu" and t.isfinite().all() for t in tensors)


def exact(rows):
    return rows.detach().double().numpy()


def tolerance(*tensors):
    double = any(t.dtype == torch.float64 for t in tensors)
    return {"rtol": 1e-6, "atol": 1e-7} if double else {"rtol": 2e-3, "atol": 2e-4}


def check_gradients(loss, *inputs):
    wanted = [t for t in inputs if t.requires_grad]
    if not loss.requires_grad or not wanted:
        return
    gradients = torch.autograd.grad(loss, wanted, allow_unused=True)
    for rows, gradient in zip(wanted, gradients, strict=True):
        if gradient is not None:
            assert (gradient.shape, gradient.dtype) == (rows.shape, rows.dtype)
            # Gradients of short embeddings overflow in float16.
            if known(*inputs) and rows.dtype != torch.float16:
                assert gradient.isfinite().all()


@fuzz
@given(problem=problems(), queue_size=st.sampled_from([0, 0, 3]))
def test_prototypes(problem, queue_size):
    z1, z2, weight = problem
    if weight.dim() != 2 or not weight.dtype.is_floating_point or 0 in weight.shape:
        return
    num_prototypes, dim = weight.shape
    prototypes = SinkhornPrototypes(dim, num_prototypes, queue_size=queue_size)
    prototypes.weight = torch.nn.Parameter(weight.detach())
    prototypes.to(weight.device)
    result = attempt(prototypes, z1, z2)
    nearest = attempt(prototypes.assign, z1)
    if nearest is not None:
        assert nearest.shape == z1.shape[:1]
    if result is None:
        return
    if weight.device.type == "cpu":
        assert attempt(diagnostics, result)
    check_gradients(sum(view.log_probs.sum() for view in result), z1, z2, prototypes.weight)
    if not known(z1, z2, weight):
        return
    for rows, view in zip((z1, z2), result, strict=True):
        expected = oracle.targets(exact(rows), exact(weight), 0.05, 3)
        np.testing.assert_allclose(view.targets.double(), expected, **tolerance(rows, weight))
        log_p = oracle.log_predictions(exact(rows), exact(weight), 0.2)
        np.testing.assert_allclose(
            view.log_probs.detach().double(), log_p, **tolerance(rows, weight)
        )


@st.composite
def families(draw, num_prototypes):
    """Options of PGCLLoss for so many prototypes in all; some windows are invalid."""
    cuts = draw(st.sets(st.integers(1, num_prototypes), max_size=2)) | {0, num_prototypes}
    ends = sorted(cuts)
    heads = [end - start for start, end in itertools.pairwise(ends)]
    end = draw(st.integers(1, min(heads) + draw(ODD)))
    return {
        "num_prototypes": heads,
        "negative_ranks": draw(st.sampled_from([None, (draw(st.integers(0, end - 1)), end)])),
        "soft_clusters": draw(st.booleans()),
    }


@fuzz
@given(
    problem=problems(),
    mode=st.fixed_dictionaries(MODES),
    num_views=st.integers(1, 4),
    engine=st.sampled_from(ENGINES),
    data=st.data(),
)
def test_pgcl(problem, mode, num_views, engine, data):
    z1, z2, weight = problem
    if weight.dim() != 2 or not weight.dtype.is_floating_point or 0 in weight.shape:
        return
    views = [z1, z2, z2.flip(0), z1][:num_views]
    member = data.draw(families(len(weight)))
    pgcl = attempt(lambda: PGCLLoss(weight.shape[1], **mode, **member, engine=engine))
    if pgcl is None:
        return
    pgcl.to(weight.device).prototypes.weight = torch.nn.Parameter(weight.detach())
    terms = attempt(pgcl.terms, *views)
    if terms is None:
        return
    assert num_views > 1
    check_gradients(terms.loss, z1, z2, pgcl.prototypes.weight)
    if not known(*views, weight):
        return
    if weight.device.type == "cpu":
        assert attempt(diagnostics, terms, weight)
    rows = [exact(z) for z in views]
    heads = pgcl.prototypes.heads
    prototypes = [exact(of_head) for of_head in weight.split(heads)]
    targets = exact(torch.cat([view.targets for view in terms.assignments]))
    q_of_heads = np.split(targets, np.cumsum(heads)[:-1], axis=1)
    if member["negative_ranks"] and any((np.diff(np.sort(q)) < 1e-6).any() for q in q_of_heads):
        return  # rounding decides which of them is the better one
    weights = oracle.family_weights(
        np.concatenate(rows),
        q_of_heads,
        prototypes,
        mode["weighting"],
        mode["exclude_same_cluster"],
        member["negative_ranks"],
        member["soft_clusters"],
    )
    contrast = oracle.contrast(rows, weights, None, mode["temperature"], False, mode["negatives"])
    consistency = []
    for of_head in prototypes:
        q = [oracle.targets(z, of_head, 0.05, 3) for z in rows]
        log_p = [oracle.log_predictions(z, of_head, mode["temperature"]) for z in rows]
        consistency.append(oracle.mean(oracle.consistency(log_p, q)))
    expected = oracle.mean(contrast) + 6 * oracle.mean(consistency)
    assert terms.loss.item() == pytest.approx(
        expected, rel=tolerance(*views, weight)["rtol"], abs=1e-3
    )


@st.composite
def item_sets(draw, dim, dtype, with_items):
    """Sets of any lengths with items, or views without; most of them fit together."""
    lengths = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    lengths = lengths if with_items or draw(ODD) else lengths[:1] * len(lengths)
    sets = [draw(tensors((length, dim), dtype)) for length in lengths]
    if not with_items:
        return sets, None
    items = [draw(tensors((length,), torch.int64)) for length in lengths]
    if draw(ODD):
        items[0] = draw(st.sampled_from([None, items[-1], items]))
    if draw(ODD):
        items = draw(st.sampled_from([items[:-1], items[0], 3]))
    return sets, items


def remembers(loss, *given):
    loss.remember(*given)
    return True


@fuzz
@given(
    options=st.fixed_dictionaries(
        {
            "temperature": st.sampled_from([0.05, 0.2, 1.0]),
            "negatives": st.sampled_from(["all", "cross"]),
            "memory_size": st.sampled_from([0, 3, 20]),
            "hardness": st.sampled_from([0.0, 0.0, 1.0, 2.0, -1.0]),
            "debias": st.sampled_from([0.0, 0.0, 0.1, 0.5, 1.0]),
            "engine": st.sampled_from(ENGINES),
        }
    ),
    learned=st.booleans(),
    with_items=st.booleans(),
    dim=st.integers(1, 4),
    dtype=st.sampled_from(FLOATS),
    by_hand=st.integers(0, 3),
    data=st.data(),
)
def test_info_nce(options, learned, with_items, dim, dtype, by_hand, data):
    """Three steps; before one of them the memory may be given embeddings by hand."""
    loss = attempt(lambda: InfoNCE(**options, dim=dim, reduction="none").double())
    assert (loss is not None) == (options["hardness"] >= 0 and options["debias"] < 1)
    if loss is None:
        return
    if learned:
        loss.temperature = torch.nn.Parameter(torch.tensor(loss.temperature))
    mode = {name: options[name] for name in ("temperature", "negatives", "hardness", "debias")}
    past, filled_by_hand = oracle.Memory(options["memory_size"]), False
    for step in range(3):
        if step == by_hand:
            sets, items = data.draw(item_sets(dim, dtype, with_items))
            of_set = items[0] if isinstance(items, list) and items else None
            if attempt(remembers, loss, sets[0], of_set):
                if not known(sets[0]) or sets[0].dtype != dtype:
                    return
                filled_by_hand = True
                past.clear()
                past.store(arrays(sets[:1]), None if of_set is None else [of_set.tolist()])
        sets, items = data.draw(item_sets(dim, dtype, with_items))
        result = attempt(functools.partial(loss, items=items), *sets)
        if result is None:
            continue
        check_gradients(result.sum(), *sets)
        if any(z.device.type == "meta" or z.dtype != dtype for z in sets):
            return
        if not known(*sets):
            continue  # the memory is as before
        items = [items] * len(sets) if isinstance(items, torch.Tensor) else items
        expected, _ = exact_losses(sets, items, past, **mode)
        np.testing.assert_allclose(result.detach().double(), expected, **tolerance(*sets))
        if options["memory_size"] > 0 and not filled_by_hand:
            past.store(arrays(sets), numbers(items))
