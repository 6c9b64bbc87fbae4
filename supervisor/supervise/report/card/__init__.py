"""The incident card: one document per incident, `incident.json`, and every view of it.

    incident_document.py   audit records, a policy, frames -> the document (`incident_schema.py`)
    text.py, markdown.py, html.py   the document -> a terminal, Markdown, a page
    message_facts.py                the document -> a message

Pure: no file, clock or network here. A view reads the document and nothing else, so that all of
them agree; what is not known says so in the document.
"""
