"""What a function of a user's makes of small random batches, and facts about it.

The function gets copies of the batches. Its modules, and the states of random numbers, are
afterwards as they were before.
"""

import inspect
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

# N and D of the batches. Candidates are fitted to the first one. In the second and fourth one the
# views of half of the graphs are opposite: there a function differs that clamps a loss or a cosine.
# In the third one two labels have one embedding. The last two are large, one of them with similar
# embeddings: there a function differs that takes the hardest negatives alone, leaves out similar
# ones, or cuts its batch.
SIZES = ((9, 6), (8, 6), (12, 9), (90, 32), (100, 6))
NUM_LARGE = 2

Function = Callable[..., Any]
Facts = tuple[list[str], list[str]]


def labels_of(n: int) -> Tensor:
    """The labels of a batch."""
    few = [0, 0, 0, 1, 1, 1, 2, 2, 2, 2, 3, 4]
    # In a large batch, similar embeddings have other labels.
    return torch.tensor(few[:n]) if n <= len(few) else torch.arange(n) % 7


def batch(seed: int, n: int, dim: int) -> list[Tensor]:
    """Two views of random embeddings, which have any lengths.

    In two of the batches the views of half of the graphs are opposite, and in the last batch each
    embedding of the second half is similar to one of the first half.
    """
    generator = torch.Generator().manual_seed(seed)
    first, noise = torch.randn(2, n, dim, dtype=torch.float64, generator=generator)
    first, noise = first * (6 / dim) ** 0.5, noise * (6 / dim) ** 0.5  # dot products of any D alike
    if n == SIZES[-1][0]:
        first[n // 2 :] = first[: n // 2] + 0.1 * first[n // 2 :]
        noise = 0.1 * noise
    lengths = 0.5 + torch.rand(2, n, 1, dtype=torch.float64, generator=generator)
    second = first + 0.7 * noise
    if n in (SIZES[1][0], SIZES[3][0]):
        second[::2] = noise[::2] - first[::2]
    return [first * lengths[0], second * lengths[1]]


class NotFiniteError(Exception):
    """The function is not finite on a batch."""


class Probe(NamedTuple):
    """What the function makes of one batch."""

    views: list[Tensor]
    value: float
    gradient: Tensor  # by the views that have one
    learned: list[int]  # which views these are

    def direction(self) -> Tensor:
        """The gradient, divided by its length."""
        direction: Tensor = self.gradient / self.gradient.norm().clamp_min(1e-300)
        return direction

    def is_single(self) -> bool:
        """Whether the function computes in float32: its value or its gradient shows it."""
        gradient = self.gradient
        is_rounded = torch.equal(gradient.float().double(), gradient)
        return is_rounded or float(np.float32(self.value)) == self.value

    def in_span(self) -> "Probe":
        """The probe with fewer coordinates, if the embeddings have more than they span.

        A rotation changes no score. One more coordinate, in which embeddings and gradients of our
        losses are 0, keeps the length of what the gradient has outside of the span.
        """
        dim = self.views[0].shape[1]
        basis = torch.linalg.qr(torch.cat(self.views).detach().T).Q  # [D, R]
        if basis.shape[1] >= dim - 1:
            return self
        gradient = self.gradient.view(-1, dim)
        inside = gradient @ basis
        outside = (gradient - inside @ basis.T).norm(dim=1, keepdim=True)
        views = [F.pad(z.detach() @ basis, (0, 1)) for z in self.views]
        return self._replace(views=views, gradient=torch.cat([inside, outside], 1).flatten())


def probe(function: Function, views: Sequence[Tensor], labels: bool) -> Probe:
    """Call the function on a batch."""
    views = [z.detach().requires_grad_() for z in views[: 1 if labels else 2]]
    n, dim = views[0].shape
    given = [labels_of(n)] if labels else []
    try:
        try:  # the function gets copies, which it may change
            value = function(*[z.clone() for z in views], *given)
        except RuntimeError as error:  # a module in float32
            if not any(word in str(error) for word in ("Double", "double", "dtype")):
                raise
            value = function(*[z.float() for z in views], *given)
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise TypeError(f"it must return a scalar Tensor, but returned {_shown(value)}")
        if not value.requires_grad:
            raise TypeError("its value has no gradient: it is detached, or made under no_grad")
        gradients = torch.autograd.grad(value.sum(), views, allow_unused=True)
    except Exception as error:
        what = f"embeddings [{n}, {dim}] and labels [{n}]" if labels else f"two views [{n}, {dim}]"
        raise TypeError(
            f"the function failed with {what} on the CPU ({type(error).__name__}: {error}): "
            + _advice(function, str(error), labels)
        ) from error
    parts = [d.flatten() for d in gradients if d is not None]
    gradient = torch.cat([views[0].new_zeros(0), *parts])
    if not value.isfinite().all() or not gradient.isfinite().all():
        where = ", of which two labels have one embedding" * (labels and n == SIZES[2][0])
        raise NotFiniteError(f"value or gradient is not finite on a batch of {n}{where}")
    learned = [place for place, d in enumerate(gradients) if d is not None]
    return Probe(views, value.item(), gradient, learned)


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return str(tuple(value.shape))
    return f"a {type(value).__name__}"


def _advice(function: Function, error: str, labels: bool) -> str:
    """What to do about an error of the function."""
    if "returned (" in error:
        return "of one loss for each row take the mean: lambda z1, z2: f(z1, z2).mean()"
    if any(f"returned a {name}" in error for name in ("tuple", "list", "dict")):
        return "take the loss out of it, as in recognize(lambda z1, z2: f(z1, z2)[0])"
    if any(word in error for word in ("CUDA", "cuda", "NVIDIA")):
        return "it moves tensors to a GPU: make them with device=z1.device, and take .cuda() out"
    advice = "wrap it, as in recognize(lambda z1, z2: model.loss(z1, z2))"
    with suppress(TypeError, ValueError, IndexError):
        second = [*inspect.signature(function).parameters][1]
        if not labels and any(word in second.lower() for word in ("label", "target", "class")):
            return f"its second argument is {second}: give labels=True"
    advice += "" if labels else "; if its second argument are labels, give labels=True"
    fixed = "of a loss with a batch size: lambda z1, z2: Loss(len(z1))(z1, z2)"
    return f"{advice}; it must take 8 to 100 rows ({fixed}); if it takes one D alone, give dim="


@contextmanager
def untouched(function: Function) -> Iterator[None]:
    """A block after which the function's modules and the states of random numbers are as before.

    In the block torch has one thread, since batches are small, and threads wait for each other.
    """
    owners = [function, getattr(function, "__self__", None)]
    if isinstance(function, partial):
        owners += [function.func, *function.args, *function.keywords.values()]
    if inspect.isfunction(function):
        captured = inspect.getclosurevars(function)
        owners += [*captured.nonlocals.values(), *captured.globals.values()]
    modules = {m for owner in owners if isinstance(owner, nn.Module) for m in owner.modules()}
    training = [(module, module.training) for module in modules]
    tensors = {x for m in modules for x in (*m.parameters(), *m.buffers()) if not is_lazy(x)}
    before = [(x, x.detach().clone(), x.grad) for x in tensors]
    states, threads = (random.getstate(), np.random.get_state()), torch.get_num_threads()  # noqa: NPY002  # scripts use it
    try:
        torch.set_num_threads(1)
        # Within torch.device each operation takes longer.
        is_on_cpu = torch.get_default_device().type == "cpu"
        on_cpu = nullcontext() if is_on_cpu else torch.device("cpu")
        with torch.random.fork_rng(devices=[]), torch.enable_grad(), on_cpu:
            yield
    finally:
        torch.set_num_threads(threads)
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        for module, mode in training:
            module.training = mode
        for x, value, grad in before:
            x.data.copy_(value)
            x.grad = grad


def changing(function: Function, first: Probe, labels: bool) -> str:
    """Why two calls with one batch differ; empty if they do not."""

    def again() -> Probe:
        rows, dim = first.views[0].shape
        probe(function, batch(9, rows - 1, dim), labels)  # which a queue may take in
        for seed in (torch.manual_seed, random.seed, np.random.seed):  # scripts use it
            seed(0)
        return probe(function, first.views, labels)

    def differ(one: Probe, other: Probe) -> bool:
        return one.value != other.value or not torch.equal(one.gradient, other.gradient)

    if not differ(first, probe(function, first.views, labels)):
        return ""
    if differ(again(), again()):
        return "it keeps a state: two calls with one batch differ, also with the same random seed"
    return "it is random: two calls with one batch differ"


def facts(function: Function, first: Probe, labels: bool) -> Facts:
    """Facts about a function: what no loss of ours has, whatever is added to it, and others."""
    n, dim = first.views[0].shape
    generator = torch.Generator().manual_seed(9)
    noise = [torch.randn(z.shape, dtype=z.dtype, generator=generator) for z in first.views]

    def value(*views: Tensor) -> float:
        with suppress(TypeError, NotFiniteError):
            return probe(function, views, labels).value
        return float("nan")

    def same(change: Callable[[Tensor], Tensor]) -> bool:
        difference = abs(value(*map(change, first.views)) - first.value)
        return difference <= 1e-4 * (abs(first.value) + 1e-8)

    def moved(step: float) -> float:
        both = enumerate(zip(first.views, noise, strict=True))
        return value(*[z + step * dz if place in first.learned else z for place, (z, dz) in both])

    def difference(step: float) -> float:
        return moved(step) - moved(-step)

    def has_negatives() -> bool:
        """Whether the gradient of four graphs has another direction without the other graphs."""
        with suppress(TypeError, NotFiniteError):
            part = probe(function, [z[:4] for z in first.views], labels).gradient
            of_all = first.gradient.view(-1, n, dim)[:, :4].flatten()
            return float(F.cosine_similarity(part, of_all, 0)) < 1 - 1e-6
        return True

    step = 1e-3 if first.is_single() else 1e-4  # of a difference of fourth order
    slope = (8 * difference(step) - difference(2 * step)) / (12 * step)
    directions = torch.cat([noise[place].flatten() for place in first.learned])
    off = abs(slope - float(first.gradient @ directions))
    rounding = (1e-3 if first.is_single() else 1e-10) * (1 + abs(first.value))
    lengths = torch.linspace(0.5, 2, n, dtype=torch.float64).unsqueeze(1)
    order, columns = (torch.randperm(num, generator=generator) for num in (n, dim))
    rotation = torch.linalg.qr(torch.randn(dim, dim, dtype=torch.float64, generator=generator)).Q
    is_rotated = not same(lambda z: z @ rotation)
    by_column = is_rotated and same(lambda z: z[:, columns])
    excluding = {
        "its gradient is not the derivative of its value: a part is detached, or it rounds to half "
        "precision": off > 1e-3 * float(first.gradient.norm()) + rounding,
        "its value depends on the order of the graphs": not labels and not same(lambda z: z[order]),
        "its value changes if all embeddings are rotated: it has a layer such as a projection "
        "head, prototypes, or keys of its own such as a queue": is_rotated and not by_column,
        "its value changes if all embeddings are rotated, but not if their columns change places: "
        "it compares columns, or changes each coordinate, as an activation does": by_column,
        "it has no negatives: no graph is compared with another": not labels
        and not has_negatives(),
    }
    others = {
        "one of its views has no gradient": len(first.learned) < len(first.views),
        "its value depends on the lengths of embeddings: it has no cosines": not same(
            lambda z: z * lengths
        ),
        "a vector that is added to all embeddings changes nothing: it has distances, or centres "
        "the embeddings": same(lambda z: z + 0.3) and not same(torch.square),
    }
    holding, more = ([fact for fact, holds in x.items() if holds] for x in (excluding, others))
    return holding, more
