"""Where training batches come from: a batch is a function of seed and step."""
