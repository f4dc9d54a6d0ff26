"""What a comparison says: rows, tables, and the page."""
