"""Which room imports which: `make graph`. Imports for types alone and inside functions count.

    python -m tests.import_graph

A room is a package, or a module that stands beside the packages; the core has rooms of its own.
Exit code 1: modules or rooms import each other in a circle.
"""

from __future__ import annotations

import graphlib
import sys
from collections import Counter

from tests.test_architecture import Module, circle, read_modules, within

PACKAGES = ("supervise", "supervise.core", "supervise_probe", "supervise_offline")


def room(name: str, package: str) -> str:
    """Return the part of `package` that a module lies in, "" for the package itself."""
    return name.removeprefix(package).lstrip(".").partition(".")[0]


def edges(package: str, modules: list[Module]) -> dict[str, Counter[str]]:
    """Return how many imports lead from each room of `package` to each other one."""
    inside = [module for module in modules if within(module.name, (package,))]
    names = {module.name for module in inside}
    found: dict[str, Counter[str]] = {}
    for module in inside:
        here = found.setdefault(room(module.name, package), Counter())
        for _, target, _ in module.imports():
            there = room(target, package)
            if target in names and there and there != room(module.name, package):
                here[there] += 1
    return {name: found[name] for name in sorted(found) if name}


def rings(package: str, modules: list[Module]) -> list[list[str]]:
    """Return a circle of modules and one of rooms, where there are any."""
    found = [circle([module for module in modules if within(module.name, (package,))])]
    try:
        graphlib.TopologicalSorter(edges(package, modules)).prepare()
    except graphlib.CycleError as error:
        found.append(list(error.args[1]))
    return [ring for ring in found if ring]


def main() -> int:
    """Print the graph of each package, and every circle."""
    modules, circles = read_modules(), 0
    for package in PACKAGES:
        found = edges(package, modules)
        inside = sum(within(module.name, (package,)) for module in modules)
        bad = rings(package, modules)
        circles += len(bad)
        print(f"{package}: {inside} modules in {len(found)} rooms, {len(bad)} circles")
        for ring in bad:
            print("  circle: " + " -> ".join(ring))
        width = max(map(len, found))
        for name, targets in found.items():
            told = ", ".join(f"{target} {count}" for target, count in sorted(targets.items()))
            print(f"  {name:{width}}  {told and '-> ' + told}")
        print()
    return int(circles > 0)


if __name__ == "__main__":
    sys.exit(main())
