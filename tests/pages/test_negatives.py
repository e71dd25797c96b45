"""The functions of docs/negatives.md have the values of the papers' and scripts' formulas."""

import math

import pytest
import torch
import torch.nn.functional as F
from helpers.scripts import ROOT
from test_docs import run_blocks
from torch.distributions import Beta

from pgcl_losses import InfoNCE

N, TAU = 128, 1.0


@pytest.fixture(scope="module")
def page():
    """The names that the code of the page makes."""
    torch.manual_seed(0)
    names = run_blocks(ROOT / "docs" / "negatives.md")
    names["loss_of"] = lambda name, *views, **given: InfoNCE(score_mod=names[name])(*views, **given)
    return names


def literal(z1, z2, log_weights, tau=TAU):
    """NT-Xent whose negatives have weights, -inf where a pair is left out: query by query."""
    z = F.normalize(torch.cat([z1, z2]).double())
    cosines, losses = z @ z.T, []
    for i in range(2 * N):
        positive = (i + N) % (2 * N)
        others = [j for j in range(2 * N) if j not in (i, positive)]
        logits = cosines[i] / tau + log_weights(i, cosines[i])
        log_s = logits[others].logsumexp(0)
        losses.append(F.softplus(log_s - cosines[i, positive] / tau))
    return torch.stack(losses).mean().float()


def of_each(*values):
    return torch.cat(values).double()


def test_negatives_of_the_same_slide(page):
    z1, z2, slide = page["z1"], page["z2"], page["slide"]
    slides = of_each(slide, slide)
    expected = literal(z1, z2, lambda i, _: torch.where(slides == slides[i], 0.0, -math.inf))
    found = page["loss_of"]("of_the_same_slide", z1, z2, metadata=slide)
    torch.testing.assert_close(found, expected)


def test_time_and_distance(page):
    z1, z2, seconds, position = (page[name] for name in ("z1", "z2", "seconds", "position"))
    times, places = of_each(seconds, seconds), of_each(position, position)
    found = page["loss_of"]("at_another_time", z1, z2, metadata=seconds)
    expected = literal(
        z1, z2, lambda i, _: torch.where((times - times[i]).abs() < 10, -math.inf, 0.0)
    )
    torch.testing.assert_close(found, expected)

    def by_distance(i, _):
        distances = (places - places[i]).norm(dim=1)
        return (1 - (-(distances**2)).exp()).log()

    found = page["loss_of"]("near_ones_count_less", z1, z2, metadata=position)
    torch.testing.assert_close(found, literal(z1, z2, by_distance))


def test_masks_by_cosine(page):
    z1, z2 = page["z1"].clone(), page["z2"] + page["z1"]
    z1[:9] = z1[9:18]  # false negatives
    expected = literal(z1, z2, lambda i, cosines: torch.where(cosines > 0.9, -math.inf, 0.0))
    found = page["loss_of"]("below_a_cosine", z1, z2)
    torch.testing.assert_close(found, expected)
    assert (found - InfoNCE()(z1, z2)).abs() > 1e-4

    def hardest(i, cosines):
        others = sorted(cosines[j] for j in range(2 * N) if j not in (i, (i + N) % (2 * N)))
        return torch.where(cosines < others[-10], -math.inf, 0.0)

    torch.testing.assert_close(page["loss_of"]("ten_hardest", z1, z2), literal(z1, z2, hardest))


def test_the_margin_of_cosface(page):
    """-log e^{(s - m) / tau} / (e^{(s - m) / tau} + sum_j e^{s_j / tau})."""
    z1, z2 = page["z1"], page["z2"]
    z = F.normalize(torch.cat([z1, z2]))
    logits = z @ z.T
    own, positive = torch.arange(2 * N), torch.arange(2 * N).roll(N)
    logits[own, positive] -= 0.1
    logits[own, own] = -math.inf
    expected = F.cross_entropy(logits / TAU, positive)
    torch.testing.assert_close(page["loss_of"]("margin", z1, z2), expected)


def test_adnce(page):
    """Mean over negatives, as the script has it, with cosines of one view and the other."""
    z1, z2 = page["z1"], page["z2"]
    cosines = F.normalize(z1) @ F.normalize(z2).T
    losses = []
    for i in range(N):
        s = torch.cat([cosines[i, :i], cosines[i, i + 1 :]])
        w = torch.exp(-((s - 0.7) ** 2) / (2 * 1.0**2)) / math.sqrt(2 * math.pi)
        of_negatives = ((s / 0.2).exp() * w / w.mean()).mean()
        losses.append(-(cosines[i, i] / 0.2) + of_negatives.log())
    found = InfoNCE.like("GraphCL", score_mod=page["adnce"])(z1, z2) - math.log(N - 1)
    torch.testing.assert_close(found, torch.stack(losses).mean())


def test_progcl(page):
    z1, z2 = page["z1"], page["z2"]

    def log_weights(i, cosines):
        s = ((cosines + 1) / 2).clamp(1e-6, 1 - 1e-6)
        true, false = (Beta(*ab).log_prob(s).exp() for ab in ((3.0, 3.0), (8.0, 2.0)))
        w = 0.9 * true / (0.9 * true + 0.1 * false) * s
        others = [j for j in range(2 * N) if j not in (i, (i + N) % (2 * N))]
        return (w / w[others].mean()).log()

    torch.testing.assert_close(page["loss_of"]("progcl", z1, z2), literal(z1, z2, log_weights))


def test_imolclr(page):
    """With the factors of the script: one for each other molecule, in both views."""
    z1, z2, bits = page["z1"], page["z2"], page["fingerprints"].bool()
    z = F.normalize(torch.cat([z1, z2]))
    cosines, losses = z @ z.T, []
    for i in range(2 * N):
        logits = [cosines[i, (i + N) % (2 * N)]]
        for j in range(2 * N):
            if j % N != i % N:
                a, b = bits[i % N], bits[j % N]
                tanimoto = (a & b).sum() / (a | b).sum()
                logits.append(cosines[i, j] * (1 - 0.5 * tanimoto))
        losses.append(F.cross_entropy(torch.stack(logits) / 0.1, torch.tensor(0)))
    loss = InfoNCE(temperature=0.1, score_mod=page["imolclr"])
    found = loss(z1, z2, metadata=page["fingerprints"])
    torch.testing.assert_close(found, torch.stack(losses).mean())


def test_log_q(page):
    """With the correction of all items, as the paper has it."""
    users, items, q, own = page["users"], page["items"], page["q"], torch.arange(N)
    corrected = F.normalize(users) @ F.normalize(items).T / TAU - q.log()
    loss = InfoNCE(negatives="cross", queries="first", score_mod=page["log_q"])
    found = loss(users, items, metadata=page["q"])
    torch.testing.assert_close(found, F.cross_entropy(corrected, own))


def test_rgcl(page):
    """-log(pos / sum_j e^{s_ij} + 0.1 pos / (sum_j e^{s_ij of z3} + pos))."""
    z1, z2, z3 = (F.normalize(page[name]) for name in ("z1", "z2", "z3"))
    sim, sim_cp = (z1 @ z2.T / TAU).exp(), (z1 @ z3.T / TAU).exp()
    pos = sim.diag()
    expected = -(pos / sim.sum(1) + 0.1 * pos / (sim_cp.sum(1) + pos)).log().mean()
    a, b = page["first"], page["second"]
    torch.testing.assert_close(-((-a).exp() + 0.1 * (-b).exp()).log().mean(), expected)
