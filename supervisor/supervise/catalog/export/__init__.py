"""Exports of the policy language: JSON Schemas, tables of the READMEs, problems, origins."""
