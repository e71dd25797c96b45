"""A fit as a line of code and in words."""

import math
from dataclasses import dataclass
from typing import Any

import torch

from pgcl_losses.info_nce import InfoNCE
from pgcl_losses.presets import PRESETS, as_written
from pgcl_losses.recognition.candidates import DIFFERENCES, NOT_MASKED
from pgcl_losses.recognition.fit import Fit, Search
from pgcl_losses.recognition.probe import SIZES, Probe

CONSTANT = "it adds a number to the value that depends on the batch and has no gradient, as log(N)"


@dataclass(frozen=True)
class Recognized:
    """What `recognize` found. Print it, and copy ``line``: it is the loss."""

    kind: str  # "exact", "nearly", "unit" (for embeddings of length 1) or "none"
    differences: tuple[str, ...] = ()  # what the function does besides, or facts about it
    line: str = ""  # the value of the function as Python; for "none" the nearest loss, if any
    names: tuple[str, ...] = ()  # scripts that have the loss of the line, at any temperature
    like: str = ""  # the loss of the line by the first name
    error: float = math.inf  # the largest relative error of the gradient

    def __str__(self) -> str:
        lines = [self.line] if self.kind != "none" else ["no loss of this package"]
        if self.like and self.kind in ("exact", "unit"):
            lines.append(f"the loss of {', '.join(self.names)}: {self.like}")
        if self.kind == "exact":
            sizes = f"{min(SIZES)[0]} to {max(SIZES)[0]} graphs"
            lines.append(f"value and gradient agree to {self.error:.0e} on batches of {sizes}")
        elif self.kind == "unit":
            lines.append("equal for embeddings of length 1; what the function makes of lengths")
            lines[-1] += " cannot be seen"
        elif self.kind == "nearly":
            lines.append("nearly:")
        elif self.line:
            lines.append(f"nearest: {self.line}; its gradient is {self.error:.1%} off")
        return "\n".join([*lines, *(f"- {difference}" for difference in self.differences)])


def described(fit: Fit, search: Search) -> Recognized:
    """Write a fit as a line of code. It is exact, or nearly if it has differences."""
    options, numbers = _options_and_numbers(fit, search)
    constant, depends = _constant(fit, search)
    differences = [*_differences(fit), *fit.growth.differences, *[CONSTANT] * depends]
    is_one_call = sum(number != 0 for number in numbers) == 1
    names = _names(options, len(fit.weights) == 1) if is_one_call else ()
    return Recognized(
        "nearly" if differences else "exact",
        tuple(differences),
        _line(options, numbers, fit.growth.power, constant, search.probes[0]),
        names,
        _like(names, options),
        fit.error,
    )


def loss_of(fit: Fit, search: Search) -> str:
    """Write the loss of a fit alone, without its factor and its constant."""
    return f"InfoNCE({as_written(_options_and_numbers(fit, search)[0])})"


def _options_and_numbers(fit: Fit, search: Search) -> tuple[dict[str, Any], list[float]]:
    """The options of ``InfoNCE``, and how much each direction counts: one number if both do."""
    fitted = {name: _rounded(x, fit.error) for name, x in fit.numbers.items()}
    options: dict[str, Any] = {name: x for name, x in fitted.items() if name not in DIFFERENCES}
    options |= fit.candidate.options
    weights, near = fit.weights.tolist(), max(10 * search.tolerance, min(10 * fit.error, 0.02))
    factor = sum(weights) or math.nan
    shares = [x / factor if abs(x / factor) > near else 0.0 for x in weights]
    if fit.growth.is_sum:
        options["reduction"] = "sum"
    if len(shares) == 2 and abs(shares[0] - 0.5) <= near:
        factor, shares = (factor / 2 if fit.growth.is_sum else factor), [1.0]
    elif len(shares) == 2:
        options["queries"] = "first"
    options = {name: options[name] for name in InfoNCE.options if name in options}
    return options, [_rounded(factor * x, fit.error) for x in shares]


def _differences(fit: Fit) -> list[str]:
    """Say what the function does that ``InfoNCE`` does not."""
    numbers = fit.numbers.items()
    found = [DIFFERENCES[name].format(x) for name, x in numbers if name in DIFFERENCES]
    return found if fit.candidate.is_masked else [NOT_MASKED, *found]


def _constant(fit: Fit, search: Search) -> tuple[float, bool]:
    """Find what the function adds to our value, and whether it depends on the batch."""
    values = torch.tensor([x.value for x in search.probes], dtype=torch.float64)
    added = values - fit.values
    noise = 10 * max(search.tolerance, fit.error) * max(1.0, float(values.abs().max()))
    if float(added.max() - added.min()) > noise:
        return 0.0, True
    return (_rounded(float(added[0])) if float(added.abs().max()) > noise else 0.0), False


def _line(
    options: dict[str, Any], numbers: list[float], power: float, constant: float, first: Probe
) -> str:
    """Write the value as Python: a call for each direction, times a number each."""
    z1, z2 = (
        name if place in first.learned else f"{name}.detach()"
        for place, name in enumerate(("z1", "z2"))
    )
    has_labels = len(first.views) == 1
    calls = ["(z, labels=labels)"] if has_labels else [f"({z1}, {z2})", f"({z2}, {z1})"]
    written = {1.0: "", -1.0: "-"}
    parts = [
        written.get(number, f"{number:.12g} * ") + f"InfoNCE({as_written(options)}){call}"
        for number, call in zip(numbers, calls, strict=False)  # one call, if both are equal
        if number
    ]
    line = " + ".join(parts)
    if power:
        size = f"len({'z' if has_labels else 'z1'}) ** {power:g}"
        line = f"{size} * {line if len(parts) == 1 else f'({line})'}"
    return line + f" {'-' if constant < 0 else '+'} {abs(constant):.12g}" * (constant != 0)


def _rounded(number: float, error: float = 0.0) -> float:
    """Round to few digits, if the number is as near to them as it can be known."""
    near = min(max(1e-9, 10 * error), 1e-3) * abs(number)
    digits = (float(f"{number:.{n}g}") for n in range(1, 18))
    return next((x for x in digits if abs(x - number) <= near), number)


def _names(options: dict[str, Any], labels: bool) -> tuple[str, ...]:
    """The scripts whose loss has these options, at any temperature."""
    default = InfoNCE()

    def comparable(given: dict[str, Any]) -> dict[str, Any]:
        compared = [name for name in InfoNCE.options if name not in ("temperature", "reduction")]
        return {name: given.get(name, getattr(default, name)) for name in compared}

    wanted = comparable(options)
    return tuple(
        name
        for name, preset in PRESETS.items()
        if not preset.value
        and (", labels=" in preset.call if labels else preset.call.count(",") == 1)
        and ("=" in preset.call) == labels
        and comparable(preset.options) == wanted
    )


def _like(names: tuple[str, ...], options: dict[str, Any]) -> str:
    """The loss by the first name, with the function's temperature in place of the script's."""
    given: dict[str, Any] = {"temperature": options["temperature"]}
    given |= {"reduction": "sum"} if "reduction" in options else {}
    return f'InfoNCE.like("{names[0]}", {as_written(given)})' if names else ""
