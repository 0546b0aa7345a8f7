"""Build the page of `reflogp report` from a dataset's tokens and its stored log-probs."""
