"""Build the page that `reflogp report` writes about a scored dataset, from the dataset's tokens and stored log-probs."""
