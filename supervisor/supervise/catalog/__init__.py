"""YAML files and the parts they name -> one frozen policy. Nothing here runs anything."""

from .policy import load_policy, locate
from .problems import PolicyErrors, Problem

__all__ = ["PolicyErrors", "Problem", "load_policy", "locate"]
