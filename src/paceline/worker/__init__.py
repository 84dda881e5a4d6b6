"""The worker: runs plans on a model and keeps per-row state where the compute is."""
