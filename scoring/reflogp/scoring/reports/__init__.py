"""Build the page that `reflogp report` writes about a scored dataset, from its tokens and the stored log-probs."""
