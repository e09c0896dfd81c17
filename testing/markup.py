"""A name that is markup: of a folder, of a text, of whatever a page shows."""

HOSTILE = '<img src=x onerror="alert(1)">'
