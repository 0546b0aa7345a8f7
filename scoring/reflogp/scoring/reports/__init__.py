"""Make the page of `reflogp report` about a scored dataset, from its tokens and stored values alone; no model is loaded."""
