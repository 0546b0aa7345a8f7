"""Build the page and charts of `reflogp report` from a dataset's tokens and its stored log-probs."""
