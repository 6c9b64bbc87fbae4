"""YAML files and the parts they name -> one frozen policy. Nothing here runs anything."""

from .assembly.policy_loader import load_policy, locate
from .document.diagnostics import PolicyErrors, Problem

__all__ = ["PolicyErrors", "Problem", "load_policy", "locate"]
