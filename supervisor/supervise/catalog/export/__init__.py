"""What is told of policies elsewhere: JSON Schemas, tables of the READMEs, SARIF, origins."""
