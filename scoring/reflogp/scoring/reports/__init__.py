"""`reflogp report`: a page about a scored dataset, from its tokens and stored values alone. Loads no model."""
