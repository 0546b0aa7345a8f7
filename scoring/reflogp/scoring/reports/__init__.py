"""Build the page that `reflogp report` writes about a scored dataset, from tokens and stored values; no model is loaded."""
